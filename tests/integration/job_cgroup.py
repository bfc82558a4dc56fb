"""A cgroup (v2) for tests, as a scheduler makes one for a job."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.linux import mount as kernel
from tests.support import lacking, wait_until


@pytest.fixture
def group() -> Iterator[Path]:
    """Skips where none can be made; with CI set that is an error."""
    found = [each.target for each in kernel.mounts() if each.fstype == "cgroup2"]
    why = "" if found else "no cgroup2 is mounted"
    path = Path(found[0] if found else "/nowhere") / f"bootseer-test-{secrets.token_hex(4)}"
    if not why:
        try:
            path.mkdir()
        except OSError as error:
            why = f"{path}: {error.strerror}"
    if why:
        lacking(why)
    yield path
    if path.exists():
        (path / "cgroup.kill").write_text("1")
        wait_until(lambda: try_remove(path), 20, "the end of a cgroup")


def try_remove(path: Path) -> bool:
    """With those in it; False while a process is in one of them."""
    try:
        for each in path.iterdir():
            if each.is_dir() and not try_remove(each):
                return False
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True
