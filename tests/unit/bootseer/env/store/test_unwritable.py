"""The reasons for which a store cannot be written: each names the store and the fix."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.env.store.unwritable import explain_failure, why_unwritable
from bootseer.errors import BootseerError, PermissionDenied, StorageError, Unavailable
from bootseer.storage import open_store
from bootseer.storage.os_errors import map_os_errors

READ_ONLY = " is read-only: name a store that you can write, or mount it for writing"
REFUSED = ": this user may not write there: name a store that you can write, or change its permissions"
FULL = " is full: delete environments (`bootseer env gc`), or name another store"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, READ_ONLY),
        (errno.EACCES, REFUSED),
        (errno.EPERM, REFUSED),
        (errno.ENOSPC, FULL),
        (errno.EDQUOT, FULL),
    ],
)
def test_errors_of_the_system(number: int, reason: str) -> None:
    with pytest.raises(StorageError) as caught, map_os_errors("/s/keys/ab/lease-000001.json"):
        raise OSError(number, os.strerror(number))
    assert explain_failure(caught.value, "/s") == f"--env-store /s{reason}"


def written(url: str) -> BootseerError:
    async def write() -> None:
        await open_store(url).publish("keys/ab/lease-000001.json", b"x", if_absent=True)

    with pytest.raises(StorageError) as caught:
        aio.run_sync(write())
    aio.close()
    return caught.value


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    reason = f"--env-store {file} is a file: name a directory"
    assert why_unwritable(str(file)) == explain_failure(written(str(file)), str(file)) == reason
    below = f"{file}/envs"
    reason = f"--env-store {below}: {file} is a file: name a directory"
    assert why_unwritable(below) == explain_failure(written(below), below) == reason


def test_no_parent(tmp_path: Path) -> None:
    url = f"{tmp_path}/a/b"
    reason = f"--env-store {url}: its parent directory {tmp_path}/a does not exist: make it, or correct the path"
    assert why_unwritable(url, needs_parent=True) == reason
    assert why_unwritable(url) == "", "the first write makes it"
    with pytest.raises(StorageError) as caught, map_os_errors(f"{url}/keys"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert explain_failure(caught.value, url) == reason


def test_what_can_be_written(tmp_path: Path) -> None:
    assert why_unwritable(str(tmp_path)) == why_unwritable(f"file://{tmp_path}/new", checks_space=True) == ""
    assert why_unwritable("hdfs://namenode/envs") == "", "not known without a write"


def test_other_stores_and_errors() -> None:
    url = "hdfs://name:secret@namenode/envs"
    text = explain_failure(PermissionDenied("namenode: user ann: no"), url)
    assert "this user may not write there: namenode: user ann: no; name a store" in text and "secret" not in text
    assert (
        explain_failure(Unavailable("/s/a: Input/output error"), "/s")
        == "--env-store /s: /s/a: Input/output error"
    )
