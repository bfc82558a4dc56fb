"""Who compiles what pip installs: pip itself, as soon as anybody has said how; else we, and the same files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from bootseer.env.capture.pip_bytecode import OFF, compile_installed, find_sources, variables
from bootseer.env.exec_place import HERE, ExecPlace
from tests.support import wait_until

REALTIME_COARSE = 5  # the time module does not name it
INSTALL = "pip install -r requirements.txt"


def decide(
    tmp_path: Path, *commands: str, environ: dict[str, str] | None = None, only_installs: bool = True
) -> dict[str, str]:
    given = {"HOME": os.fspath(tmp_path), "XDG_CONFIG_DIRS": os.fspath(tmp_path / "xdg"), **(environ or {})}
    # What this machine's own settings say is no matter here.
    inside = ExecPlace(prefix=("/usr/bin/env", f"PIP_CONFIG_FILE={given.get('PIP_CONFIG_FILE', '/dev/null')}"))
    return variables(commands or (INSTALL,), given, inside, only_installs=only_installs)


def test_pip_leaves_it_to_us(tmp_path: Path) -> None:
    assert decide(tmp_path) == OFF
    assert decide(tmp_path, environ={"PYTHONDONTWRITEBYTECODE": "1"}) == OFF, "pip itself compiles all the same"


@pytest.mark.parametrize(
    "command",
    [
        "pip install --no-compile -r requirements.txt",
        "pip install --compile -r requirements.txt",
        "PIP_NO_COMPILE=0 pip install x",
        "SOURCE_DATE_EPOCH=1 pip install x",
        "python -O -m pip install x",
        "python -IO -m pip install x",
        "pip install x && python -m compileall lib",
    ],
)
def test_commands_that_have_decided(tmp_path: Path, command: str) -> None:
    assert decide(tmp_path, command) == {}


@pytest.mark.parametrize(
    "name", ["PIP_COMPILE", "PIP_NO_COMPILE", "SOURCE_DATE_EPOCH", "PYTHONPYCACHEPREFIX", "PYTHONOPTIMIZE"]
)
def test_variables_that_have_decided(tmp_path: Path, name: str) -> None:
    assert decide(tmp_path, environ={name: "1"}) == {}


@pytest.mark.parametrize(
    "place", [".pip/pip.conf", ".config/pip/pip.conf", "xdg/pip/pip.conf", "own.conf", "venv/pip.conf"]
)
def test_settings_that_have_decided(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    environ = {"VIRTUAL_ENV": os.fspath(tmp_path / "venv")}
    if place == "own.conf":
        environ["PIP_CONFIG_FILE"] = os.fspath(path)
    path.write_text("[install]\nquiet = 1")
    assert decide(tmp_path, environ=environ) == OFF
    path.write_text("[install]\nno-compile = no")  # its last line has no end
    assert decide(tmp_path, environ=environ) == {}


def test_other_programs_and_what_cannot_be_asked(tmp_path: Path) -> None:
    assert decide(tmp_path, only_installs=False) == {}
    missing = ExecPlace(prefix=(os.fspath(tmp_path / "no-such-program"),))
    assert variables([INSTALL], {"HOME": "/"}, missing, only_installs=True) == {}


def install(target: Path, name: str, files: dict[str, str], *, installer: str = "pip", more: str = "") -> None:
    """As pip leaves a package."""
    directory = target / "lib" / "python3" / "site-packages"
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    for path, text in files.items():
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (info / "INSTALLER").write_text(f"{installer}\n")
    (info / "RECORD").write_text("".join(f'"{path}",sha256=x,1\n' for path in files) + more)


def bytecode_of(path: Path) -> Path:
    return Path(importlib.util.cache_from_source(os.fspath(path)))


def run(target: Path, began_ns: int = 0) -> str:
    return compile_installed([os.fspath(target)], began_ns, sys.executable, 2, {}, HERE)


def test_what_was_installed_is_compiled_to_its_place(tmp_path: Path) -> None:
    target = tmp_path / "env"
    directory = target / "lib" / "python3" / "site-packages"
    install(target, "old", {"old.py": "X = 1\n"})
    stamp_ns = (directory / "old-1.0.dist-info" / "RECORD").stat().st_ctime_ns
    # Files are stamped by a clock that ticks: what comes now has a later stamp.
    wait_until(lambda: time.clock_gettime_ns(REALTIME_COARSE) > stamp_ns, what="a tick of the clock of files")
    began_ns = time.clock_gettime_ns(REALTIME_COARSE)
    install(target, "pack", {"pack/__init__.py": "X = 1\n", "pack/a, b.py": "Y = 2\n", "pack/bad.py": "x = = 3\n"})
    install(target, "others", {"others.py": "X = 1\n"}, installer="conda")
    (tmp_path / "outside.py").write_text("X = 1\n")
    (target / "bin").mkdir()
    (target / "bin" / "program.py").write_text("X = 1\n")
    outside = "../../../../outside.py,,\n../../../bin/program.py,,\npack/gone.py,,\n"
    install(target, "odd", {"odd.py": "X = 1\n"}, more=outside)
    assert run(target, began_ns) == ""
    made = set(tmp_path.rglob("*.pyc"))
    assert made == {bytecode_of(directory / name) for name in ("pack/__init__.py", "pack/a, b.py", "odd.py")}
    spec = importlib.util.spec_from_file_location("pack", directory / "pack" / "__init__.py")
    assert spec is not None and spec.loader is not None
    code = spec.loader.get_code("pack")  # type: ignore[attr-defined]
    assert code.co_filename == os.fspath(directory / "pack" / "__init__.py")


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "env"
    install(target, "pack", {"pack/__init__.py": "X = 1\n"}, more="pack/link.py,,\n")
    (tmp_path / "users.py").write_text("X = 1\n")
    (target / "lib/python3/site-packages/pack/link.py").symlink_to(tmp_path / "users.py")
    assert [os.path.basename(path) for path in find_sources(os.fspath(target), 0)] == ["__init__.py"]


@pytest.mark.parametrize("record", [b'"pack/__init__.py,sha256', b"\0\0", b"", b"\xff\xfe.py,,\n"])
def test_damaged_records(tmp_path: Path, record: bytes) -> None:
    target = tmp_path / "env"
    install(target, "pack", {"pack/__init__.py": "X = 1\n"})
    (target / "lib/python3/site-packages/pack-1.0.dist-info/RECORD").write_bytes(record)
    assert run(target) == ""


def test_what_goes_wrong_is_reported(tmp_path: Path) -> None:
    target = tmp_path / "env"
    install(target, "pack", {"pack/__init__.py": "X = 1\n"})
    assert "no interpreter" in compile_installed([os.fspath(target)], 0, "", 2, {}, HERE)
    shutil.rmtree(target)
    assert run(target) == "", "set-up has removed it"
