"""`python -m tests.parity.record`: runs the probes under torchrun and writes recorded/torch-<version>.json.

Every probe runs at least twice and must show the same each time. With names as arguments only those are recorded
anew and the rest of the file stays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib import metadata
from typing import Any

from tests.parity import overlay
from tests.parity.compare import compare
from tests.parity.model import Observation, Probe
from tests.parity.probes import BY_NAME, PROBES
from tests.parity.runner import run
from tests.support import TORCHRUN

DIRECTORY = os.path.join(os.path.dirname(__file__), "recorded")


def path_of(version: str) -> str:
    """The file of a torch version; its local part ("+cpu") makes no difference."""
    return os.path.join(DIRECTORY, f"torch-{version.partition('+')[0]}.json")


def load(path: str) -> dict[str, Any]:
    """A recording; an empty one where there is no file yet."""
    if not os.path.exists(path):
        return {"probes": {}}
    with open(path, encoding="utf-8") as file:
        data: dict[str, Any] = json.load(file)
    return data


def is_later(since: str, version: str) -> bool:
    """Whether a torch version does not have what came with another one."""
    numbers = [tuple(map(int, text.partition("+")[0].split("."))) for text in (since or "0", version)]
    return numbers[0] > numbers[1]


def record(probe: Probe, rounds: int, torchrun: str = TORCHRUN) -> tuple[Observation, list[str]]:
    """What torchrun shows, and what was not the same in each round."""
    first = json.loads(json.dumps(run(probe, [torchrun])))
    unstable: list[str] = []
    for _ in range(rounds - 1):
        again = json.loads(json.dumps(run(probe, [torchrun])))
        unstable += compare(first, again, ()).unexplained
    return first, unstable


def main() -> int:
    """Records and tells; the exit status is 1 when a probe is not stable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="probes to record (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--missing", action="store_true", help="only probes that are new or have changed")
    parser.add_argument("--torch", default="", help="another version than the installed one (overlay.py)")
    parser.add_argument("--wheel", default="", help="of that version; default: pip brings it")
    args = parser.parse_args()
    version = args.torch or metadata.version("torch")
    with tempfile.TemporaryDirectory(prefix="parity-torch-") as directory:
        torchrun = overlay.make(version, directory, args.wheel) if args.torch else TORCHRUN
        return record_all(args, version, torchrun)


def record_all(args: argparse.Namespace, version: str, torchrun: str) -> int:
    """The probes that were asked for, by one torchrun."""
    path = path_of(version)
    data = load(path)
    data.update(torch=version.partition("+")[0], python=platform.python_version())
    known = data["probes"]
    for name in set(known) - set(BY_NAME):
        del known[name]
    has_it = [probe for probe in PROBES if not is_later(probe.since, version)]
    chosen = [probe for probe in has_it if not args.names or probe.name in args.names]
    chosen.sort(key=lambda probe: probe.since == "")  # what is new first
    if args.missing:
        chosen = [probe for probe in chosen if known.get(probe.name, {}).get("digest") != probe.digest()]
    bad = 0
    for number, probe in enumerate(chosen, 1):
        observation, unstable = record(probe, args.rounds, torchrun)
        print(f"{number}/{len(chosen)} {probe.name}", *unstable, sep="\n    ", flush=True)
        bad += bool(unstable)
        known[probe.name] = {"digest": probe.digest(), "observation": observation}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, sort_keys=True)
            file.write("\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
