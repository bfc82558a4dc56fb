"""The bench of the rendezvous, small: its processes work together and its figures are complete."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests import support

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NAMES = {"seconds", "cpu_s", "rss_bytes", "bytes_per_agent", "memory_per_agent", "idle_cores", "again_s"}


def test_forty_nodes(program: support.Programs, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--agents", "40", "--rounds", "1", "--idle", "0.5", "--settle", "0", "--json", str(file)]
    run = program(sys.executable, "-m", "bench", "rendezvous", *arguments, cwd=ROOT, deadline_s=60.0)
    assert run.status == 0, run.stderr
    figures = json.loads(file.read_text())["figures"]
    assert set(figures) == {f"rendezvous.{name}" for name in NAMES}
    assert 0 < figures["rendezvous.seconds"]["value"] < 10
    assert 300 < figures["rendezvous.bytes_per_agent"]["value"] < 4096


def test_too_few_nodes_are_refused(program: support.Programs) -> None:
    run = program(sys.executable, "-m", "bench", "rendezvous", "--agents", "2", cwd=ROOT)
    assert run.status == 1 and "at least two processes" in run.stderr
