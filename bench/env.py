"""An environment on a node that has none: installed, copied, unpacked, mounted; then what a training imports.

The environment is what a training has (env_packages.py: at least 80 packages, torch among them), its wheels are
downloaded once. The ways are in env_ways.py; in each round all take turns in an order that is shuffled each time,
on a disk that is made anew (env_disk.py), and ratios are formed within rounds. What is made of the wheels stays in
--folder for the next run. Best as root: mounts, three nodes and a disk of its own need it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence

from bench.ckpt_pages import check_disk
from bench.ckpt_run import order
from bench.env_disk import Disk
from bench.env_kept import Kept, prepare
from bench.env_packages import get_wheels
from bench.env_ways import COPIES, INSTALLERS, REMOTE, WAYS, Bench, Sample, find_uv
from bench.image_kept import kept_bytes
from bench.image_remote import Link, Remote
from bench.record import BenchError, Figures, Target, note
from bootseer.errors import BootseerError

ROUNDS = 7
MINIMUM_ROUNDS = 7
TARGETS = {
    "env.vs_cp": Target(at_most=0.75, samples=MINIMUM_ROUNDS),
    "env.vs_pip": Target(at_least=15, samples=MINIMUM_ROUNDS),
    "env.vs_uv_cold": Target(at_least=5, samples=MINIMUM_ROUNDS),
    "env.mount_s": Target(at_most=0.1, samples=MINIMUM_ROUNDS),
    "env.packages": Target(at_least=80),
    "env.link_mb_s": Target(at_least=180, samples=MINIMUM_ROUNDS),
    "env.link_ms": Target(at_least=5, samples=MINIMUM_ROUNDS),
}
_DISK_PER_WHEEL_BYTE = 18  # three nodes with an environment each, or uv's cache beside two
_KEPT_PER_WHEEL_BYTE = 9  # the wheels, the reference, two archives, the store
_MIN_DISK_BYTES = 512 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--wheels", default="", metavar="DIRECTORY", help="these wheels, and no download")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this way (may be repeated)")
    parser.add_argument("--folder", default="", help="where all lies, on a real disk (default: the cache's)")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    uv = find_uv()
    missing = [name for name in ("bash", "cp", "tar", "zstd", "setpriv") if not shutil.which(name)]
    if missing:
        raise BenchError(f"not installed here: {', '.join(missing)}")
    # So that on SIGTERM, too, what was mounted and started is ended and what was written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    above = os.path.abspath(args.folder) if args.folder else default_directory()
    directory = os.path.join(above, "own" if args.wheels else "packages")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    wheels = get_wheels(directory, os.path.abspath(args.wheels) if args.wheels else "")
    disk_bytes = max(_MIN_DISK_BYTES, _DISK_PER_WHEEL_BYTE * wheels.size)
    check_disk(directory, disk_bytes + max(0, _KEPT_PER_WHEEL_BYTE * wheels.size - kept_bytes(directory)))
    disk = Disk(directory, disk_bytes)
    try:
        kept = prepare(directory, wheels, disk)
        note(f"{len(wheels.names)} packages, {kept.files} files, {kept.size / 1e9:.2f} GB")
        with (
            tempfile.TemporaryDirectory(prefix="remote-", dir=directory) as logs,
            Remote(kept.data, os.path.join(logs, "log")) as remote,
        ):
            bench = Bench(kept, disk, remote, uv)
            ways = [name for name in bench.ways() if not args.way or name in args.way]
            left_out = [name for name in args.way or WAYS if name not in ways]
            if left_out:
                note(f"left out: {', '.join(left_out)}")
            taken, links = measure(bench, ways, args.rounds)
            return to_figures(kept, disk.kind, taken, links)
    except BootseerError as error:
        raise BenchError(str(error)) from error
    finally:
        disk.close()


def measure(bench: Bench, ways: Sequence[str], rounds: int) -> tuple[dict[str, list[Sample]], list[Link]]:
    """All rounds."""
    taken: dict[str, list[Sample]] = {way: [] for way in ways}
    links: list[Link] = []
    for number in range(rounds):
        links.append(bench.link())
        for way in order(ways, number):
            found = bench.run(way)
            taken[way].append(found)
            note(f"round {number + 1} of {rounds}: {way} {found.wall_s:.2f} s, import {found.import_s:.2f} s")
    return taken, links


def default_directory() -> str:
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(above, "bootseer-bench", "env")


# ---- figures -----------------------------------------------------------------------------------------------


def to_figures(kept: Kept, disk: str, taken: Mapping[str, Sequence[Sample]], links: Sequence[Link]) -> Figures:
    """Ratios of those ways that were taken first, then what they are made of."""
    figures = Figures()

    def wall(way: str) -> list[float]:
        return [sample.wall_s for sample in taken[way]]

    def whole(way: str) -> list[float]:
        return [sample.wall_s + sample.import_s for sample in taken[way]]

    def ratio(name: str, above: str, below: str, *, is_whole: bool = False) -> None:
        if above in taken and below in taken:
            seconds = whole if is_whole else wall
            figures.add_ratio(f"env.{name}", seconds(above), seconds(below))

    ratio("vs_cp", "unpack", "cp")
    ratio("vs_pip", "pip", "unpack")
    ratio("vs_uv_cold", "uv_cold_compiled", "unpack")
    if "mount" in taken:
        figures.add("env.mount_s", "s, snapshot known", [sample.restore_s for sample in taken["mount"]])
    for way in (*INSTALLERS, *COPIES):
        ratio(f"until_import_{way}_vs_unpack", way, "unpack", is_whole=True)
        ratio(f"until_import_{way}_vs_mount", way, "mount", is_whole=True)
    ratio("remote_vs_tar", "tar_remote", "unpack_remote")
    ratio("remote_3_vs_tar", "tar_remote_3", "unpack_remote_3")
    for way, samples in taken.items():
        figures.add(f"env.{way}_until_ready_s", "s", wall(way))
        figures.add(f"env.{way}_import_s", "s", [sample.import_s for sample in samples])
        if samples[0].restore_s and way != "mount":
            figures.add(f"env.{way}_restore_s", "s, snapshot known", [sample.restore_s for sample in samples])
        if way in REMOTE:
            if not all(sample.sent_bytes for sample in samples):
                raise BenchError(f"{way}: nothing was fetched where something has to be")
            figures.add(f"env.{way}_mb", "MB", [sample.sent_bytes / 1e6 for sample in samples])
            figures.add(f"env.{way}_requests", "requests", [sample.requests for sample in samples])
    figures.add("env.link_mb_s", "MB/s, 8 readers", [link.bytes_per_s / 1e6 for link in links])
    figures.add("env.link_ms", "ms a request", [link.latency_s * 1e3 for link in links])
    figures.add("env.packages", "packages", [len(kept.wheels.names)])
    figures.add("env.files", f"files; {disk}", [kept.files])
    figures.add("env.bytes", "bytes", [kept.size])
    figures.add("env.wheels_mb", "MB", [kept.wheels.size / 1e6])
    figures.add("env.packs_mb", "MB", [sum(map(os.path.getsize, kept.packs)) / 1e6])
    figures.add("env.tar_mb", "MB, zstd -3", [os.path.getsize(kept.tar) / 1e6])
    figures.add("env.setup_s", "s, once", [kept.facts["setup"]])
    figures.add("env.capture_look_s", "s, once, ranks wait", [kept.facts["end"]])
    figures.add("env.capture_build_s", "s, once, nobody waits", [kept.facts["build"]])
    return figures
