"""First steps of compiled models: cold, with caches of another node, after a crash in the middle of compiling.

In each round: a transformer under torch.compile, two ranks with gloo, on a node that has nothing, without
compile caches (`plain`) and with them (`cold`), in turns; on a fresh one with the caches that the first has
published (`restored`), and on a fresh one with what a job had published whose rank was killed while it compiled
(`crash`); a C++ extension that is built at first use, cold and restored at the same path. Fresh: another cache
folder, another user, another temporary folder. Its blocks are compiled and sharded by FSDP2 one by one, and its
loss is compiled, as large models are trained. In the first rounds the same model also as a whole in DDP (`ddp`):
torch splits its graph there, and does not keep what it traces of split graphs, so that tracing is left of a
restored first step. Once: two jobs with different models and one store (`merged`), keys of other software and
processors and caches that were changed (compile_safe.py), many models and a limit (compile_limit.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence

from bench.ckpt_pages import check_disk
from bench.ckpt_run import order
from bench.compile_job import Model
from bench.compile_limit import LIMIT_RUNS, Limited, run_limited
from bench.compile_rounds import Built, Restored, Trained, build, merge, train, train_and_restore
from bench.compile_safe import Safe, try_foreign, try_tampered
from bench.record import BenchError, Figures, Target, note
from bootseer import aio
from bootseer.errors import BootseerError
from bootseer.trust import KeyDirectory

ROUNDS = 7
MINIMUM_ROUNDS = 7
SIZES = {  # the model of the rounds, the two that are merged
    "full": (Model(4, 128, "fsdp"), Model(1, 64), Model(1, 96)),
    "small": (Model(1, 16, "fsdp"), Model(0, 16), Model(0, 24)),
}
NEEDED_BYTES = 2_000_000_000
UNITS = ("model", "extension", "ddp")
DDP_ROUNDS = 3  # without a target
TARGETS = {
    "compile.first_step_ratio": Target(at_least=10, samples=MINIMUM_ROUNDS),
    "compile.first_cost": Target(at_most=1.05, samples=MINIMUM_ROUNDS),
    # Sums of all rounds or tries: one sample each, as a median would hide what happened once.
    "compile.restored_misses": Target(at_most=0),
    "compile.ddp_restored_misses": Target(at_most=0),
    "compile.crash_lost": Target(at_most=0),
    "compile.crash_finished": Target(at_least=MINIMUM_ROUNDS),
    "compile.extension_rebuilt": Target(at_most=0),
    "compile.merged_misses": Target(at_most=0),
    "compile.merged_ratio": Target(at_least=2, samples=2),
    "compile.foreign_loaded": Target(at_most=0),
    "compile.replayed_loaded": Target(at_most=0),
    "compile.foreign_tries": Target(at_least=10),
    "compile.tampered_loaded": Target(at_most=0),
    "compile.tampered_tries": Target(at_least=5),
    "compile.limit_share": Target(at_most=1),
    "compile.limit_node_share": Target(at_most=1),
    "compile.limit_runs": Target(at_least=50),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--size", choices=SIZES, default="full", help="small: to try the bench, not to measure")
    parser.add_argument("--limit-runs", type=int, default=LIMIT_RUNS, help="models that are compiled in turn")
    parser.add_argument("--folder", default="/var/tmp", help="where caches and stores lie, on a real disk")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    missing = [name for name in ("torch", "cryptography", "zstandard") if importlib.util.find_spec(name) is None]
    scripts = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    missing += [name for name in ("c++", "ninja") if not shutil.which(name, path=scripts)]
    if missing:
        raise BenchError(f"not installed here: {', '.join(missing)}")
    check_disk(args.folder, NEEDED_BYTES)
    # So that what was started is ended and what was written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    model, first, second = SIZES[args.size]
    with tempfile.TemporaryDirectory(prefix="bench-compile-", dir=args.folder) as directory:
        keys = os.path.join(directory, "keys")
        KeyDirectory(keys).make("bench")
        try:
            trained, built, whole = measure(directory, keys, model, args.rounds)
            merged, ratios = merge(directory, keys, first, second)
            store = os.path.join(directory, "merged", "store")
            note("caches of other keys, and caches that were changed")
            foreign, replayed = try_foreign(os.path.join(directory, "foreign"), store, keys)
            tampered = try_tampered(os.path.join(directory, "tampered"), store, keys)
            limited = run_limited(os.path.join(directory, "limit"), keys, args.limit_runs)
        except BootseerError as error:
            raise BenchError(str(error)) from error
        finally:
            aio.close()
    figures = to_figures(trained, built)
    add_whole(figures, whole)
    figures.add("compile.merged_misses", "misses of both models", [sum(merged)])
    figures.add("compile.merged_ratio", "ratio, both models", ratios)
    add_safe(figures, foreign, replayed, tampered, limited)
    return figures


def measure(
    directory: str, keys: str, model: Model, rounds: int
) -> tuple[list[Trained], list[Built], list[Restored]]:
    """All rounds."""
    trained: list[Trained] = []
    built: list[Built] = []
    whole: list[Restored] = []
    for number in range(rounds):
        for unit in order(UNITS if number < DDP_ROUNDS else UNITS[:2], number):
            place = os.path.join(directory, f"{unit}-{number}")
            if unit == "model":
                found = train(place, keys, model, random.Random(number).uniform(0.2, 0.8), number % 2 == 0)
                trained.append(found)
                told = f"without caches {found.plain.first_s:.1f} s, cold {found.cold.first_s:.1f} s"
                told += f", restored {found.restored.first_s:.2f} s"
                told += f", after a crash {found.crashed.first_s:.1f} s, lost {found.lost} of {found.finished}"
            elif unit == "ddp":
                whole.append(train_and_restore(place, keys, model._replace(how="ddp")))
                told = f"cold {whole[-1].cold_s:.1f} s, restored {whole[-1].restored_s:.2f} s"
            else:
                built.append(build(place, keys))
                told = f"cold {built[-1].cold_s:.1f} s, restored {built[-1].restored_s:.2f} s"
            note(f"round {number + 1} of {rounds}: {unit} {told}")
            shutil.rmtree(place)
    return trained, built, whole


# ---- figures -----------------------------------------------------------------------------------------------


def to_figures(trained: Sequence[Trained], built: Sequence[Built]) -> Figures:
    """Of the rounds."""
    figures = Figures()
    cold = [each.cold.first_s for each in trained]
    restored = [each.restored.first_s for each in trained]
    crashed = [each.crashed.first_s for each in trained]
    plain = [each.plain.first_s for each in trained]
    figures.add_ratio("compile.first_step_ratio", cold, restored)
    figures.add_ratio("compile.first_cost", cold, plain)
    seeded = [each.restored.first_s + each.seed_s for each in trained]
    figures.add_ratio("compile.first_step_with_seed_ratio", cold, seeded)
    figures.add_ratio("compile.crash_ratio", cold, crashed)
    figures.add("compile.restored_misses", "misses, all rounds", [sum(each.restored.misses for each in trained)])
    figures.add("compile.restored_hits", "hits, all ranks", [each.restored.hits for each in trained])
    figures.add("compile.crash_lost", "finished files, all rounds", [sum(each.lost for each in trained)])
    figures.add("compile.crash_finished", "files, all rounds", [sum(each.finished for each in trained)])
    figures.add("compile.plain_first_step_s", "s", plain)
    figures.add("compile.cold_first_step_s", "s", cold)
    figures.add("compile.restored_first_step_s", "s", restored)
    figures.add("compile.crash_first_step_s", "s", crashed)
    figures.add("compile.later_step_s", "s", [each.restored.later_s for each in trained])
    figures.add("compile.seed_s", "s", [each.seed_s for each in trained])
    figures.add("compile.seed_mb", "MB", [each.size / 1e6 for each in trained])
    extension = [each.cold_s for each in built]
    figures.add_ratio("compile.extension_ratio", extension, [each.restored_s for each in built])
    figures.add("compile.extension_rebuilt", "times, all rounds", [sum(each.is_rebuilt for each in built)])
    figures.add("compile.extension_cold_s", "s", extension)
    figures.add("compile.extension_restored_s", "s", [each.restored_s for each in built])
    figures.add("compile.extension_seed_s", "s", [each.seed_s for each in built])
    return figures


def add_whole(figures: Figures, whole: Sequence[Restored]) -> None:
    """Of the model in DDP."""
    restored = [each.restored_s for each in whole]
    figures.add_ratio("compile.ddp_first_step_ratio", [each.cold_s for each in whole], restored)
    figures.add("compile.ddp_restored_misses", "misses, all rounds", [sum(each.misses for each in whole)])
    figures.add("compile.ddp_restored_first_step_s", "s", restored)


def add_safe(
    figures: Figures, foreign: Mapping[str, int], replayed: Mapping[str, int], tampered: Safe, limited: Limited
) -> None:
    """What may not be loaded, file by file, and the limit."""
    figures.add("compile.foreign_loaded", "files, by another key", [sum(foreign.values())])
    figures.add("compile.replayed_loaded", "files, put under another key", [sum(replayed.values())])
    figures.add("compile.foreign_tries", "keys that differ in one thing", [len(foreign)])
    figures.add("compile.tampered_loaded", "files that are not what was signed", [sum(tampered.wrong.values())])
    figures.add("compile.tampered_tries", "changes of a file", [len(tampered.wrong)])
    figures.add("compile.untouched_loaded", "files, for comparison", [tampered.right])
    figures.add("compile.limit_share", "of the limit, largest generation", [limited.store_share])
    figures.add("compile.limit_node_share", "of the limit, node when a job begins", [limited.node_share])
    figures.add("compile.limit_runs", "models", [limited.runs])
    figures.add("compile.limit_evicted", "files", [limited.evicted])
    figures.add("compile.limit_mb", "MB", [limited.limit_bytes / 1e6])
