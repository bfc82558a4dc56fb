"""`make demo-setup`: the same environment twice, installed by the first start and restored by the second.

Each start has a fresh virtual environment at the same path and a node's folders of its own, so the second one is
what another node would do. What is checked is read from the events of the two starts, from the environment store
and from the environments themselves. Both starts are shown stage by stage.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

from bootseer.events import read_events
from bootseer.report import StartSummary, summarise_start

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPTS = sysconfig.get_path("scripts")
PUBLISH_S = 300.0  # the first start publishes while its ranks run, and may go on after them


class Start:
    """One start: what it took, and how the environment came."""

    def __init__(self, logs: str) -> None:
        events = [
            event for path in glob.glob(f"{glob.escape(logs)}/*/events/*.jsonl") for event in read_events(path)
        ]
        self.summary: StartSummary = summarise_start(events)
        ends = [event.attrs for event in events if event.name == "setup"]
        self.how = next((str(attrs["how"]) for attrs in ends if "how" in attrs), "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description="Install an environment once, restore it at the next start.")
    parser.add_argument("requirements", nargs="?", default=os.path.join(TOP, "examples", "requirements.txt"))
    requirements = os.path.abspath(parser.parse_args().requirements)
    folder = tempfile.mkdtemp(prefix="bootseer-demo-")
    try:
        problems = run_demo(requirements, folder)
    finally:
        for node in ("first", "second"):
            end_mounts(os.path.join(folder, node))
    if problems:
        for problem in problems:
            print(f"demo: FAILED: {problem}")
        print(f"demo: logs and the store are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print("demo: ok")
    return 0


def run_demo(requirements: str, folder: str) -> list[str]:
    """What went wrong."""
    store = os.path.join(folder, "store")
    installed = start("first", requirements, folder)
    if isinstance(installed, str):
        return [installed]
    if not wait_published(store):
        return [f"the first start published nothing in {store} within {PUBLISH_S:g} s"]
    first_list = freeze(folder)
    restored = start("second", requirements, folder)
    if isinstance(restored, str):
        return [restored]
    show(installed, restored)
    problems = []

    def expect(happened: object, text: str) -> None:
        print(f"  {'yes' if happened else 'NO '}  {text}")
        if not happened:
            problems.append(f"not so: {text}")

    expect(installed.how == "installed", f"the first start ran the set-up (it was {installed.how})")
    expect(restored.how in ("mount", "unpack"), f"the second start restored it (it was {restored.how})")
    expect(len(snapshots(store)) == 1, "the store has one environment")
    if restored.how == "unpack":  # a mount is seen by the ranks alone
        expect(freeze(folder) == first_list, "pip lists the same distributions")
    return problems


def start(node: str, requirements: str, folder: str) -> Start | str:
    """One job on a node that has nothing; the error if it failed."""
    venv = os.path.join(folder, "venv")
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    logs = os.path.join(folder, node, "logs")
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHON_EXEC": os.path.join(venv, "bin", "python"),
        **environ_of(os.path.join(folder, node)),
    }
    argv = [
        os.path.join(SCRIPTS, "bootrun"),
        *("--standalone", "--nproc-per-node", "2", "--log-dir", logs, "--tee", "3"),
        *("--setup", f"pip install --quiet -r {requirements}", "--setup-input", requirements),
        *("--env-store", os.path.join(folder, "store")),
        os.path.join(TOP, "examples", "train.py"),
        *("--checkpoints", os.path.join(folder, node, "checkpoints"), "--steps", "50"),
    ]
    print(f"\n== {node} start\n+ {shlex.join(argv)}", flush=True)
    status = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, check=False).returncode
    return Start(logs) if status == 0 else f"the {node} start ended with status {status}"


def environ_of(node: str) -> dict[str, str]:
    """Folders of a node of its own."""
    for name in ("cache", "run"):
        os.makedirs(os.path.join(node, name), mode=0o700, exist_ok=True)
    return {"BOOTSEER_CACHE": os.path.join(node, "cache"), "BOOTSEER_RUNTIME": os.path.join(node, "run")}


def snapshots(store: str) -> list[dict[str, object]]:
    """What `bootseer env list` finds that can be used: a key that somebody is at work for is listed, too."""
    argv = [os.path.join(SCRIPTS, "bootseer"), "env", "list", "--env-store", store, "--json"]
    found = subprocess.run(argv, stdout=subprocess.PIPE, check=False)
    listed: list[dict[str, object]] = json.loads(found.stdout)["environments"] if found.returncode == 0 else []
    return [each for each in listed if each["is_usable"]]


def wait_published(store: str) -> bool:
    """Until it is there; meanwhile it is said how much is."""
    began_s = reported_s = time.monotonic()
    print("\n== the environment is published, at low priority, so that the next start finds it", flush=True)
    while not snapshots(store):
        now_s = time.monotonic()
        if now_s - began_s > PUBLISH_S:
            return False
        if now_s - reported_s > 5:
            reported_s = now_s
            mb = sum(os.path.getsize(path) for path in glob.glob(f"{glob.escape(store)}/**", recursive=True)) / 1e6
            print(f"   {now_s - began_s:.0f} s: {mb:.0f} MB are in the store", flush=True)
        time.sleep(0.5)
    print(f"   published after {time.monotonic() - began_s:.0f} s", flush=True)
    return True


def freeze(folder: str) -> str:
    python = os.path.join(folder, "venv", "bin", "python")
    return subprocess.run([python, "-m", "pip", "freeze"], stdout=subprocess.PIPE, text=True, check=True).stdout


def end_mounts(node: str) -> None:
    """Daemons of mounted environments end by themselves after a while; the demo does not wait for that."""
    trees = os.path.join(node, "run", "trees")
    for digest in os.listdir(trees) if os.path.isdir(trees) else ():
        argv = [os.path.join(SCRIPTS, "bootseer"), "image", "umount", digest]
        subprocess.run(argv, env={**os.environ, **environ_of(node)}, stdout=subprocess.DEVNULL, check=False)


def show(first: Start, second: Start) -> None:
    """Both, stage by stage."""
    print(f"\n  {'seconds':26}{'first start':>14}{'second start':>14}")
    names = list(dict.fromkeys(each.stage for start in (first, second) for each in start.summary.stages))
    for name in names:
        print(f"  {name:26}{_seconds(first, name):>14}{_seconds(second, name):>14}")
    print(f"  {'until the first step':26}{_number(first.summary.first_step_s):>14}"
          f"{_number(second.summary.first_step_s):>14}\n")  # fmt: skip


def _seconds(start: Start, stage: str) -> str:
    return _number(next((each.seconds for each in start.summary.stages if each.stage == stage), None))


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    sys.exit(main())
