"""The interface of processes that write files for `materialise`. A module above bootseer.tree starts them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from bootseer.errors import StorageError

if TYPE_CHECKING:
    from bootseer.tree.index import Index
    from bootseer.tree.unpack.portions import Portion

Owners = Literal["as stored", "mine"]


class HelperFailedError(StorageError):
    """Helpers have failed. The files that they have written must be deleted."""


class Helpers(Protocol):
    """Processes that take portions of a tree and write them by `materialise.write_portion`."""

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    def begin(self, index: Index, directory: str, root_fd: int, owners: Owners, given: Iterator[Portion]) -> None:
        """Start them in the directory that is open as `root_fd`; they make its contents.

        Raises: HelperFailedError.
        """
        ...

    def wait(self) -> Generator[tuple[int, int], None, None]:
        """Yield bytes and files since the last time, until all is written; at times (0, 0).

        Raises: HelperFailedError; errors that a single process would raise as well.
        """
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """The skipped attributes, when all is written."""
        ...
