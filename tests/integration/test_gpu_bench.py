"""bench/gpu.sh where there is no GPU: its environment is made, no section ends another, all is told."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import gpu, gpu_place
from bench.check import check_file
from bench.gpu import Part
from bench.record import Figures
from tests import support

TOP = Path(__file__).parents[2]
SCRIPT = TOP / "bench/gpu.sh"
# Sections that are none: one is stuck, with a process in a session of its own; one fails; one is in order.
SECTIONS = {
    "stuck": """
import subprocess, time
def measure(section):
    section.sample("stuck_s", "s", 1.5)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
""",
    "fails": """
def measure(section):
    section.say("about to fail")
    raise ValueError("no such\\n    thing")
""",
    "fine": """
def measure(section):
    for value in (1, 3, 2):
        section.sample("fine_s", "s", value)
""",
}


def run_script(*words: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *words],
        env={**support.clean_environ(), "PYTHON": sys.executable, **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_it_is_a_script() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    assert os.access(SCRIPT, os.X_OK)
    told = run_script("--help", environ={})
    assert told.returncode == 0 and "bench/gpu.sh wheels" in told.stdout and "#" not in told.stdout


def test_what_can_be_done_without_a_gpu(tmp_path: Path) -> None:
    run = run_script("--size", "tiny", "--rounds", "1", environ={"OUT": os.fspath(tmp_path)})
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("GPU: ")
    outcomes = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1 : 1 + len(gpu.SECTIONS)]}
    assert list(outcomes) == list(gpu.SECTIONS)
    assert outcomes["check"] == outcomes["tests"] == "not run: no GPU"
    assert outcomes["start"].startswith("done; 4 samples"), run.stderr
    assert any(line.startswith("gpu.restart_fork_s ") for line in lines)
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["facts"]["sections"] == outcomes
    assert check_file(os.fspath(tmp_path / "gpu.json"), lambda *_: {}) == 0


@pytest.fixture
def sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those above, as modules; a folder for what is written."""
    (tmp_path / "modules").mkdir()
    for name, text in SECTIONS.items():
        (tmp_path / f"modules/section_{name}.py").write_text(text)
    parts = {name: Part(f"section_{name}", 1.5 if name == "stuck" else 30.0, False) for name in SECTIONS}
    monkeypatch.setattr(gpu, "SECTIONS", parts)
    monkeypatch.setattr(gpu, "become_subreaper", lambda: None)  # of this process, which is the test
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{TOP}")
    return tmp_path / "out"


def run_sections(out: Path, **more: object) -> Figures:
    given = {"sections": list(SECTIONS), "size": "tiny", "limit_s": 100.0, "began": 0.0, "rounds": 1}
    return gpu.run(argparse.Namespace(**{**given, "json": os.fspath(out / "gpu.json"), **more}))


def test_a_section_ends_no_other_and_leaves_nothing(sections: Path) -> None:
    figures = run_sections(sections)
    outcomes = figures.facts["sections"]
    assert outcomes["stuck"].startswith("FAILED: not done within 2 s; 1 samples"), outcomes
    assert outcomes["fails"].startswith("FAILED: ValueError: no such thing; 0 samples"), outcomes
    assert outcomes["fine"].startswith("done; 3 samples")
    assert (figures["gpu.stuck_s"].value, figures["gpu.fine_s"].value) == (1.5, 2)
    assert "about to fail" in (sections / "gpu-fails.log").read_text()
    assert json.loads((sections / "gpu.json").read_text())["facts"]["sections"] == outcomes


def test_no_section_is_begun_that_has_no_time(sections: Path) -> None:
    figures = run_sections(sections, limit_s=gpu.RESERVE_S + gpu.MIN_S)
    assert set(figures.facts["sections"].values()) == {"not run: no time left"}
    assert len(figures) == 0


# ---- its environment -----------------------------------------------------------------------------------------


def make_wheel(directory: Path) -> None:
    directory.mkdir()
    with zipfile.ZipFile(directory / "taken-1-py3-none-any.whl", "w") as archive:
        archive.writestr("taken/__init__.py", "VALUE = 1")
        archive.writestr("taken-1.data/purelib/also.py", "VALUE = 2")
        archive.writestr("taken-1.data/scripts/taken", "#!python")
        archive.writestr("taken-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: taken\nVersion: 1\n")


def test_an_environment_over_one_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_place, "WHEELS", os.fspath(tmp_path / "wheels"))
    monkeypatch.setattr(gpu_place, "VENV", os.fspath(tmp_path / "venv"))
    make_wheel(tmp_path / "wheels")
    base = gpu_place.ask(sys.executable)
    assert base is not None
    assert gpu_place.build(base) == 0
    python = capfd.readouterr().out.strip()
    assert python == os.fspath(tmp_path / "venv/bin/python")
    text = """
import also, importlib.metadata, launcher, msgspec, taken
print(taken.VALUE, also.VALUE, launcher.__file__, importlib.metadata.version("bootseer") > "0")
"""
    told = subprocess.run(
        [python, "-c", text], capture_output=True, text=True, cwd="/", env=support.clean_environ()
    )
    assert told.stdout.splitlines()[0] == f"1 2 {TOP / 'launcher/__init__.py'} True", told.stderr
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.executable)")
    told = subprocess.run(
        [tmp_path / "venv/bin/bootrun", "--nproc-per-node", "1", script], capture_output=True, text=True
    )
    assert told.stdout == python + "\n", told.stderr


def test_an_interpreter_that_has_all_is_taken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    assert gpu_place.make() == 0
    assert capfd.readouterr().out == sys.executable + "\n"


def test_no_torch_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_place, "candidates", lambda: ["/bin/true", "/nowhere"])
    assert gpu_place.make() == 1
    assert "no Python here has torch" in capfd.readouterr().err
