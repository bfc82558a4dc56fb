"""Errors of the operating system become ours."""

from __future__ import annotations

import errno

import pytest

from bootseer.errors import AlreadyExists, NotFound, PermissionDenied, StorageError, Unavailable
from bootseer.storage.os_errors import map_os_errors


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.ENOTDIR, NotFound),
        (errno.EEXIST, AlreadyExists),
        (errno.EACCES, PermissionDenied),
        (errno.EPERM, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.ETIMEDOUT, Unavailable),
        (errno.ECONNRESET, Unavailable),
        (errno.ENOSPC, StorageError),
        (errno.EDQUOT, StorageError),
        (errno.EMFILE, StorageError),
        (errno.ENAMETOOLONG, StorageError),
        (errno.EISDIR, StorageError),
    ],
)
def test_kinds(number: int, kind: type[StorageError]) -> None:
    import os

    with pytest.raises(StorageError) as caught, map_os_errors("/some/file.bin"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert str(caught.value).startswith("/some/file.bin")
    assert isinstance(caught.value.__cause__, OSError)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), map_os_errors("/x"):
        raise ZeroDivisionError
