"""The installers of `bench env_key`, pinned, each in a virtual environment of its own; wheels of build backends.

uv comes first, by the venv's own pip; it installs the others. What is there already is taken as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.record import BenchError, note

UV = "uv-0.13.9"
PIPS = ("pip-23.3.2", "pip-24.3.1", "pip-25.3", "pip-26.3")
POETRY, PDM = "poetry-2.5.1", "pdm-2.29.4"
PIPENV, HATCH, PIP_TOOLS = "pipenv-2026.10.3", "hatch-1.18.2", "pip-tools-7.6.2"
TOOLS = (UV, *PIPS, POETRY, PDM, PIPENV, HATCH, PIP_TOOLS)
BACKENDS = (
    *("setuptools==80.9.0", "wheel==0.48.0", "hatchling==1.33.0", "flit_core==4.2.0", "poetry_core==2.5.0"),
    *(
        "pdm_backend==2.5.0",
        "packaging==26.4",
        "pathspec==1.1.1",
        "pluggy==1.7.0",
        "trove_classifiers==2026.9.21.13",
        "tomlkit==0.15.1",
    ),
)
BESIDE = {PDM: ("hishel==1.4.0",)}  # newer ones it does not run with
INSTALL_S = 600.0


class Tools:
    """Where they are.

    Args: folder: that they are kept in.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.backends = os.path.join(folder, "backends")

    def program(self, tool: str) -> str:
        """The folder with its programs."""
        return os.path.join(self.folder, tool, "bin")

    def prepare(self, wanted: Sequence[str]) -> None:
        """Installs those that are missing. Raises: BenchError with what the installer said."""
        os.makedirs(self.folder, exist_ok=True)
        uv = os.path.join(self.program(UV), "uv")
        for tool in dict.fromkeys((UV, *wanted)):
            place = os.path.join(self.folder, tool)
            if os.path.exists(os.path.join(place, "done")):
                continue
            note(f"installing {tool}")
            shutil.rmtree(place, ignore_errors=True)
            name, _, version = tool.rpartition("-")
            python = os.path.join(place, "bin", "python")
            if tool == UV:
                _run([sys.executable, "-m", "venv", place])
                _run([python, "-m", "pip", "install", "-q", f"{name}=={version}"])
            else:
                _run([sys.executable, "-m", "venv", "--without-pip", place])
                _run([uv, "pip", "install", "-q", "--python", python, f"{name}=={version}", *BESIDE.get(tool, ())])
            with open(os.path.join(place, "done"), "w"):
                pass
        if not os.path.isdir(self.backends):
            beside = f"{self.backends}.part"
            shutil.rmtree(beside, ignore_errors=True)
            download = ["-m", "pip", "download", "-q", "--no-deps", "-d", beside, *BACKENDS]
            _run([os.path.join(self.program(UV), "python"), *download])
            os.rename(beside, self.backends)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{' '.join(command)}: not within {INSTALL_S:g} s") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
