"""`bench compile`: which figures it makes of its samples; the whole of it with models that compile in seconds."""

import json
import os
import shutil
import sys

import pytest

from bench import compile as bench_compile
from bench import compile_limit
from bench.__main__ import main
from bench.compile import add_safe, add_whole, to_figures
from bench.compile_job import Steps
from bench.compile_limit import Limited
from bench.compile_rounds import Built, Restored, Trained
from bench.compile_safe import Safe, other_documents
from bench.record import BenchError, make_document
from bootseer.env.compile_cache.key import CachesDocument, key_of
from tests.campaign import IS_FULL
from tests.support import lacking

ROUNDS = bench_compile.MINIMUM_ROUNDS
LOSSES = [["0x1p+0"]] * 2


def steps(first_s, hits=2, misses=0):
    return Steps(first_s, 0.1, LOSSES, hits, misses)


def trained(**other):
    made = Trained(steps(40.0, 0, 4), steps(2.0), 0.1, 3_000_000, steps(20.0, 1, 2), 5, 0, steps(39.0, 0, 4))
    return [made._replace(**other)] * ROUNDS


def built(**other):
    return [Built(30.0, 0.5, 0.05, False)._replace(**other)] * ROUNDS


def all_figures(rounds=None, extension=None, foreign=0, replayed=0, tampered=0, share=0.9):
    figures = to_figures(rounds or trained(), extension or built())
    add_whole(figures, [Restored(40.0, 5.0, 0)] * bench_compile.DDP_ROUNDS)
    figures.add("compile.merged_misses", "misses", [0])
    figures.add("compile.merged_ratio", "ratio", [8.0, 9.0])
    names = [str(number) for number in range(12)]
    add_safe(
        figures,
        dict.fromkeys(names, foreign),
        dict.fromkeys(names, replayed),
        Safe(dict.fromkeys(names, tampered), 9),
        Limited(50, 10**7, share, share, 30),
    )
    return figures


def met(figures):
    targets = bench_compile.TARGETS
    return {name for name, made in figures if name in targets and targets[name].is_met(made.value)}


def test_figures_are_made_of_what_they_are_named_after():
    figures = all_figures()
    assert figures["compile.first_step_ratio"].value == 20
    assert figures["compile.first_step_with_seed_ratio"].value == pytest.approx(40 / 2.1)
    assert figures["compile.crash_ratio"].value == 2
    assert figures["compile.first_cost"].value == pytest.approx(40 / 39)
    assert figures["compile.extension_ratio"].value == 60
    assert figures["compile.ddp_first_step_ratio"].value == 8
    assert met(figures) == set(bench_compile.TARGETS)
    assert make_document("compile", [], figures)["figures"]["compile.seed_mb"]["value"] == 3


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"rounds": trained(restored=steps(4.1))}, {"compile.first_step_ratio"}),
        ({"rounds": trained(plain=steps(38.0, 0, 4))}, {"compile.first_cost"}),
        ({"rounds": trained(restored=steps(2.0, 1, 1))}, {"compile.restored_misses"}),
        ({"rounds": trained(lost=1)}, {"compile.crash_lost"}),
        ({"extension": built(is_rebuilt=True)}, {"compile.extension_rebuilt"}),
        ({"foreign": 1}, {"compile.foreign_loaded"}),
        ({"replayed": 1}, {"compile.replayed_loaded"}),
        ({"tampered": 1}, {"compile.tampered_loaded"}),
        ({"share": 1.01}, {"compile.limit_share", "compile.limit_node_share"}),
    ],
)
def test_each_target_is_missed_by_what_it_is_about(change, missed):
    assert set(bench_compile.TARGETS) - met(all_figures(**change)) == missed


def test_what_happened_once_is_not_hidden_by_a_median():
    rounds, extension = trained(), built()
    rounds[3] = rounds[3]._replace(lost=1, restored=steps(2.0, 1, 1))
    extension[5] = extension[5]._replace(is_rebuilt=True)
    figures = to_figures(rounds, extension)
    add_safe(
        figures,
        {"a": 0, "b": 7, "c": 0},
        {"a": 0, "b": 0, "c": 2},
        Safe({"a": 0, "b": 0, "c": 1}, 9),
        Limited(50, 10**7, 0.9, 0.9, 30),
    )
    names = ("restored_misses", "crash_lost", "extension_rebuilt")
    names += ("foreign_loaded", "replayed_loaded", "tampered_loaded")
    assert not {f"compile.{name}" for name in names} & met(figures)


def test_other_nodes_have_other_keys():
    document = CachesDocument(
        software={"torch": "2.13.0", "python": "3.11"},
        compilers={"c++": "12"},
        accelerators=[],
        driver="",
        cpu=["avx2", "avx512f", "sse"],
        salt="",
    )
    others = dict(other_documents(document))
    assert {"software torch", "compiler c++", "cpu without avx512f", "cpu with more", "driver"} <= set(others)
    assert len({key_of(document), *map(key_of, others.values())}) == 1 + len(others)


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_FULL, reason="takes minutes: BOOTSEER_CAMPAIGN=full")
def test_the_whole_bench_runs_with_small_models(tmp_path, capsys, monkeypatch):
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    if not shutil.which("c++") or not shutil.which("ninja", path=path):
        lacking("there is no C++ compiler, or no ninja")
    monkeypatch.setattr(compile_limit, "_MODELS", 2)
    directory, out = tmp_path / "folder", tmp_path / "figures.json"
    directory.mkdir()
    options = ["--size", "small", "--limit-runs", "4", "--folder", os.fspath(directory), "--rounds", "1"]
    assert main(["compile", *options, "--json", os.fspath(out)]) == 0, capsys.readouterr().err
    figures = {name: made["value"] for name, made in json.loads(out.read_text())["figures"].items()}
    assert set(bench_compile.TARGETS) <= set(figures)
    for name in ("restored_misses", "crash_lost", "extension_rebuilt", "merged_misses"):
        assert figures[f"compile.{name}"] == 0, name
    for name in ("foreign_loaded", "replayed_loaded", "tampered_loaded"):
        assert figures[f"compile.{name}"] == 0, name
    assert figures["compile.crash_finished"] > 0
    assert figures["compile.untouched_loaded"] > 5
    assert figures["compile.limit_evicted"] > 0 < figures["compile.limit_node_share"]
    assert figures["compile.limit_share"] <= 1
    assert figures["compile.first_step_ratio"] > 1
    assert os.listdir(directory) == []


def test_a_limit_that_nothing_reaches_is_no_try():
    compile_limit.check_reached(50, 1)
    compile_limit.check_reached(3, 0)
    with pytest.raises(BenchError, match="never reached"):
        compile_limit.check_reached(50, 0)
