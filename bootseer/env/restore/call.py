"""One call of `restore`: the arguments that every method needs, and its notes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.env.restore.in_place import is_there, state_of
from bootseer.errors import ConfigError

if TYPE_CHECKING:
    from bootseer.env.reads.read_list import Reads
    from bootseer.env.store.env_tree import EnvTree
    from bootseer.env.store.snapshot import Snapshot


class RestoreCall:
    """The arguments of `restore`, validated. Raises: ConfigError."""

    def __init__(
        self,
        snapshot: Snapshot,
        tree: EnvTree,
        targets: Sequence[str],
        base: Mapping[str, str],
        reads: Reads | None,
        expected: Mapping[str, str],
        environ: Mapping[str, str],
        wait_s: float,
        before_move: Callable[[], object],
    ) -> None:
        if len(targets) != len(snapshot.targets):
            raise ConfigError(f"{len(targets)} targets given for an environment with {len(snapshot.targets)}")
        self.snapshot, self.tree = snapshot, tree
        self.targets = [os.path.realpath(target) for target in targets]
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError("two targets of an environment are the same directory")
        self.base, self.reads = dict(base), reads
        self._expected = {os.path.realpath(target): digest for target, digest in expected.items()}
        self.environ, self.wait_s = environ, wait_s
        self.before_move = before_move
        self.notes: list[str] = []  # lines for the user
        self.failures: list[str] = []  # the same, for methods that failed
        self.skipped: dict[str, int] = {}  # counts of attributes that this user or the file system cannot set
        self.began_s = time.monotonic()

    def is_there(self) -> bool:
        return is_there(self.targets, self.snapshot.key, self.snapshot.tree, environ=self.environ)

    def check_expected(self) -> None:
        for target in self.targets:
            wanted = self._expected.get(target)
            if wanted is not None and state_of(target) != wanted:
                raise ConfigError(f"{target}: changed since its environment was looked up; start again")

    def moves(self) -> list[tuple[bytes, bytes]]:
        """Return the moves for a relocation, including unchanged targets, for paths that lead there; else none."""
        pairs = list(zip(self.snapshot.targets, self.targets, strict=True))
        if all(os.path.realpath(old) == new for old, new in pairs):
            return []
        return [(os.fsencode(old), os.fsencode(new)) for old, new in pairs]
