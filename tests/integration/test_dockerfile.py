"""examples/Dockerfile, without Docker: its steps are taken in a folder and a virtual environment of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environ

TOP = Path(__file__).parents[2]
STEPS = [
    line.split(" ", 1)
    for line in (TOP / "examples" / "Dockerfile").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_only_steps_that_the_test_below_takes() -> None:
    assert [word for word, _ in STEPS][:2] == ["FROM", "WORKDIR"]
    assert {word for word, _ in STEPS[2:]} == {"COPY", "RUN", "ENTRYPOINT"}


@pytest.mark.slow
def test_the_steps_make_a_launcher_that_runs_a_job(tmp_path: Path) -> None:
    work, venv = tmp_path / "work", tmp_path / "venv"
    work.mkdir()
    # Beside the packages that are here already: what is not Bootseer itself need not be downloaded again.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    own = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    environ = {**clean_environ(), "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    entry: list[str] = []
    for word, rest in STEPS[2:]:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = work / target / source if target.endswith("/") else work / target
                copy = shutil.copytree if (TOP / source).is_dir() else shutil.copy
                copy(TOP / source, place)
        elif word == "RUN":
            program, *words = shlex.split(rest)
            assert program == "pip"
            if "-r" not in words:  # torch is here
                more = ["--no-deps", "--quiet", "--disable-pip-version-check", "--target", f"{tmp_path}/site"]
                subprocess.run([sys.executable, "-m", "pip", *words, *more], check=True, cwd=work, env=environ)
        else:
            entry = json.loads(rest)
    (pth,) = (venv / "lib").glob("python3*/site-packages")
    (pth / "site.pth").write_text(f"{tmp_path}/site\n{own}\n")
    (program,) = entry
    path = f"{tmp_path}/site/bin/{program}"
    told = ["--standalone", "--nproc-per-node", "2", "--no-python", "env"]
    run = subprocess.run(
        [f"{venv}/bin/python", path, *told], capture_output=True, text=True, cwd=work, env=environ, timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert sorted(line for line in run.stdout.splitlines() if line.startswith("RANK=")) == ["RANK=0", "RANK=1"]
    shared = tmp_path / "site" / "share"
    assert (shared / "man" / "man1" / "bootrun.1").is_file()
    assert (shared / "fish" / "vendor_completions.d" / "bootseer.fish").is_file()
    assert (shared / "doc" / "bootseer" / "reference" / "torchrun.md").is_file()
