"""One call of `restore`: what goes where, as every way needs it, and what there is to tell of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.env.restore_there import is_there, state_of
from bootseer.errors import ConfigError

if TYPE_CHECKING:
    from bootseer.env.env_tree import EnvTree
    from bootseer.env.reads import Reads
    from bootseer.env.snapshot import Snapshot


class Call:
    """See `restore` for what the arguments are. Raises: ConfigError."""

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
            raise ConfigError(f"{len(targets)} targets are given for an environment with {len(snapshot.targets)}")
        self.snapshot, self.tree = snapshot, tree
        self.targets = [os.path.realpath(target) for target in targets]
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError("two targets of an environment are one folder")
        self.base, self.reads = dict(base), reads
        self._expected = {os.path.realpath(target): digest for target, digest in expected.items()}
        self.environ, self.wait_s = environ, wait_s
        self.before_move = before_move
        self.notes: list[str] = []  # lines for people
        self.failures: list[str] = []  # the same, of ways that were tried
        self.skipped: dict[str, int] = {}  # attributes that this user or the file system cannot have
        self.began_s = time.monotonic()

    def is_there(self) -> bool:
        return is_there(self.targets, self.snapshot.key, self.snapshot.tree, environ=self.environ)

    def check_expected(self) -> None:
        for target in self.targets:
            wanted = self._expected.get(target)
            if wanted is not None and state_of(target) != wanted:
                raise ConfigError(f"{target}: was changed since its environment was looked for: start again")

    def moves(self) -> list[tuple[bytes, bytes]]:
        """Only of an environment that goes elsewhere; also targets that stay, for paths that lead there."""
        pairs = list(zip(self.snapshot.targets, self.targets, strict=True))
        if all(os.path.realpath(old) == new for old, new in pairs):
            return []
        return [(os.fsencode(old), os.fsencode(new)) for old, new in pairs]
