"""`bench peers`: which figures it makes of its samples, and which runs are none; its store keeps to its rate."""

import subprocess
import sys
import time

import pytest

from bench import peers
from bench.ckpt_run import ROOT
from bench.ckpt_server import fetch, free_ports
from bench.peers import READS, TARGETS, WAYS, Sample, to_figures, to_sample
from bench.record import BenchError
from bootseer.peers.auth import origin_id
from bootseer.peers.spans import ObjectName, cut, owners

ROUNDS = peers.ROUNDS


def taken(**other):
    samples = {
        "plain": Sample(12.0, 6.0, 0.5, 0, 0, 0),
        "peers": Sample(6.0, 1.02, 0.7, 0, 0, 0),
        "lying": Sample(7.0, 1.5, 0.7, 5, 0, 0),
        "slow": Sample(9.0, 1.3, 0.7, 0, 8, 0),
        "killed": Sample(8.0, 1.2, 0.7, 0, 0, 0),
        "reads": Sample(3.0, 1.0, 0.7, 0, 0, 0, 1.5),
        "reads_before": Sample(3.0, 1.0, 0.7, 0, 0, 0, 3.0),
        **other,
    }
    return {way: [sample] * ROUNDS for way, sample in samples.items()}


def met(figures):
    return {name for name, made in figures if name in TARGETS and TARGETS[name].is_met(made.value)}


def test_figures_are_made_of_the_ways_that_they_are_named_after():
    figures = to_figures(taken())
    assert figures["peers.origin_copies"].value == 1.02
    assert figures["peers.vs_store"].value == 2.0
    assert figures["peers.lying_added_s"].value == 1.0
    assert figures["peers.slow_copies"].value == 1.3
    assert figures["peers.cpu_ratio"].value == 0.5
    assert met(figures) == set(TARGETS)


@pytest.mark.parametrize(
    ("way", "sample", "missed"),
    [
        ("peers", Sample(6.0, 1.16, 0.7, 0, 0, 0), "peers.origin_copies"),
        ("peers", Sample(10.0, 1.0, 0.7, 0, 0, 0), "peers.vs_store"),
        ("killed", Sample(37.0, 1.0, 0.7, 0, 0, 0), "peers.killed_added_s"),
        ("reads", Sample(3.0, 1.0, 0.7, 0, 0, 0, 2.2), "peers.cpu_ratio"),
    ],
)
def test_targets_can_be_missed(way, sample, missed):
    assert met(to_figures(taken(**{way: sample}))) == set(TARGETS) - {missed}


def test_some_ways_alone_make_their_figures():
    figures = to_figures({"plain": [Sample(12.0, 6.0, 0.5, 0, 0, 0)]})
    names = ("s", "copies", "cpu_share", "reader_cpu_ns")
    assert {name for name, _ in figures} == {f"peers.plain_{name}" for name in names}


def test_each_way_to_read_is_compared_with_the_former_reader():
    ways = {way: [Sample(3.0, 1.0, 0.7, 0, 0, 0, 2.0)] for way in READS}
    names = {name for name, _ in to_figures(ways) if name.endswith("cpu_ratio")}
    assert names == {"peers.cpu_ratio", *(f"peers.{way}_cpu_ratio" for way in READS)} - {
        "peers.reads_cpu_ratio",
        "peers.reads_before_cpu_ratio",
    }
    nodes = {way: [Sample(3.0, 1.0, 0.7, 0, 0, 0, cpu_ns)] for way, cpu_ns in (("peers", 3.0), ("before", 4.0))}
    assert to_figures(nodes)["peers.node_cpu_ratio"].value == 0.75


def answer(began_s=0.0, ended_s=5.0, sums=("a", "b"), missing=0, wrong=0, **statistics):
    return {
        "began_ns": began_s * 1e9,
        "ended_ns": ended_s * 1e9,
        "sums": list(sums),
        "cpu_s": 0.5,
        "missing": missing,
        "wrong": wrong,
        "statistics": statistics,
    }


def test_a_sample_is_from_the_first_begin_to_the_last_end():
    sums = []
    found = to_sample("peers", [answer(1.0, 5.0), answer(0.5, 4.0)], 1.0, 0.5, sums, 1000)
    assert found.seconds == 4.5
    assert found.cpu_ns == 1e9 / 2000
    assert sums == ["a", "b"]


@pytest.mark.parametrize(
    ("way", "wrong_answer"),
    [
        ("peers", answer(missing=1)),
        ("peers", answer(sums=("a", "c"))),
        ("peers", answer(wrong=1, lies=1)),
        ("lying", answer()),
        ("lying", answer(wrong=3)),
        ("slow", answer()),
        ("reads", answer(bypasses=1)),
    ],
)
def test_runs_that_did_not_end_as_expected_are_no_samples(way, wrong_answer):
    with pytest.raises(BenchError, match=way):
        to_sample(way, [wrong_answer], 1.0, 0.5, ["a", "b"], 1000)
    assert set(WAYS) == set(taken())


def test_the_bad_node_has_its_share():
    ids = [f"node{number}" for number in range(1, 7)]
    objects = [("", "ckpt/model.bin", 64 << 20), ("/image/tree", "packs/a", 33_000_000)]
    made = peers.Made({}, [], objects, "")
    key = peers.choose_key("http://store:1", made, ids)
    share = {directory: origin_id(key, "http://store:1" + directory) for directory in ("", "/image/tree")}
    own = sum(
        part.length
        for directory, path, size in made.objects
        for part in cut(0, size)
        if owners(ids, ObjectName(share[directory], path), part.span) == ["node6"]
    )
    assert 0.13 < own / made.size_bytes < 0.2


def test_the_store_keeps_to_its_rate(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 2_000_000)
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "bench.peers_store", str(tmp_path), "127.0.0.1", str(port), "4e6"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            begin_s = time.monotonic()
            assert len(fetch(f"http://127.0.0.1:{port}/file")) == 2_000_000
            assert time.monotonic() - begin_s > 0.4
            assert peers.served(f"http://127.0.0.1:{port}") == 2_000_000
        finally:
            process.kill()
