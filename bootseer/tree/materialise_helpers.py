"""What `materialise` wants of other processes that write files for it. Who starts them stands above trees."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from bootseer.errors import StorageError

if TYPE_CHECKING:
    from bootseer.tree.index import Index
    from bootseer.tree.materialise_portions import Portion

Owners = Literal["as stored", "mine"]


class HelperFailedError(StorageError):
    """Helpers have not done what they were to do. What they have written is to be thrown away."""


class Helpers(Protocol):
    """Other processes, each of which takes portions of a tree and writes them by `materialise.write_portion`."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def begin(self, index: Index, folder: str, root_fd: int, owners: Owners, given: Iterator[Portion]) -> None:
        """Lets them begin, in the folder that is open as `root_fd`; what is in it they make.

        Raises: HelperFailedError.
        """
        ...

    def wait(self) -> Generator[tuple[int, int], None, None]:
        """Bytes and files since the last time, until all is written; now and then none.

        Raises: HelperFailedError; what one process would raise as well.
        """
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """What they could not have, when all is written."""
        ...
