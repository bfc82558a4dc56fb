"""How errors travel from a tree's daemon to whoever asked it."""

from __future__ import annotations

import pytest

from bootseer.errors import BootseerError, IntegrityError, StorageError
from bootseer.mounts.tree_control import from_error, to_error


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (IntegrityError("block 3 is damaged"), IntegrityError, ["block 3 is damaged"]),
        (
            FileNotFoundError(2, "No such file or directory", "/proc/self/mountinfo"),
            StorageError,
            ["/proc/self/mountinfo"],
        ),
        (OSError(28, "No space left on device", "/run/a", None, "/run/b"), StorageError, ["/run/a", "/run/b"]),
        (KeyError("name"), StorageError, ["a bug", "KeyError", "name"]),
    ],
)
def test_an_error_keeps_its_kind_and_what_it_names(
    error: Exception, kind: type[BootseerError], says: list[str]
) -> None:
    found = to_error(from_error(error), "the daemon")
    assert type(found) is kind
    assert all(each in str(found) for each in says), str(found)
