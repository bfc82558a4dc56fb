"""`make demo` brings what the demo needs, and no tool of tests: neither by pip nor by apt."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import clean_environ

TOP = Path(__file__).parents[2]
# In the place of programs that install: it says what it was called for.
TELLS = '#!/bin/sh\necho "$(basename "$0") $*" >> "$TOLD"\n'


class Place:
    """The sources, with interpreters and a package manager that install nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "sources"
        self.told = folder / "told"
        self.bin = folder / "bin"
        (self.folder / ".venv/bin").mkdir(parents=True)
        (self.folder / "scripts").mkdir()
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", "scripts/setup.sh"):
            shutil.copy(TOP / name, self.folder / name)
        for path in (self.bin / "apt-get", self.bin / "python3", self.folder / ".venv/bin/python"):
            path.write_text(TELLS)
            path.chmod(0o755)
        for name in ("bash", "sh", "env", "id", "sort", "tr", "touch", "dirname", "basename", "make"):
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)

    def make(self, *words: str) -> list[str]:
        """What was called."""
        self.told.write_text("")
        environ = {**clean_environ(), "PATH": os.fspath(self.bin), "TOLD": os.fspath(self.told)}
        environ.pop("CI", None)
        done = subprocess.run(["make", *words], cwd=self.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return self.told.read_text().splitlines()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_demo_installs_what_it_needs_and_no_more(place: Place) -> None:
    calls = place.make("demo")
    newer, pip = [call for call in calls if "pip install" in call]
    assert newer.endswith("--upgrade pip>=25.2") and pip.endswith("-e .[demo]")
    assert calls[-1].endswith("scripts/demo.py")
    assert not [call for call in calls if call.startswith("apt-get")]
    assert not [call for call in place.make("demo") if "pip install" in call], "it is there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs system packages")
def test_what_tests_need_is_installed_for_them_also_after_a_demo(place: Place) -> None:
    place.make("demo")
    calls = place.make("setup")
    assert [call for call in calls if "pip install" in call and call.endswith("-e .[test]")]
    assert [call for call in calls if call.startswith("apt-get install")]
    assert not [call for call in place.make("demo") if "pip install" in call], "all of it is there"
