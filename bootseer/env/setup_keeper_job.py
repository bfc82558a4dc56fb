"""What all parts of the keeper of an environment share: the job's wishes, what was seen, how bootrun is told.

In: the first order of bootrun (setup_keeper.py), the job's environment as this process has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bootseer.env import restore
from bootseer.env.setup_keeper_look import Looked
from bootseer.env.setup_keeper_mount import end_spares
from bootseer.env.spec import SetupSpec
from bootseer.errors import StorageTimeout

if TYPE_CHECKING:
    from bootseer.env.setup_keeper import Connection


class Job:
    """One job's environment on one node."""

    def __init__(self, order: Mapping[str, Any], connection: Connection) -> None:
        self.environ = dict(os.environ)
        self.order = order
        self.is_plain: bool = order["is_plain"]  # set-up is run whatever is kept somewhere
        self.log_path: str = order["log_path"]
        self.peers: str = order.get("peers", "")  # path of the file of the job's peers; "": nobody is asked
        self.looked: Looked | None = None
        self.why_no_key = ""
        self.is_ready = False
        self.is_publishing = False
        self._connection = connection

    @cached_property
    def spec(self) -> SetupSpec:
        """Raises: ConfigError, to who asks first."""
        given = self.order["spec"]
        return SetupSpec(
            commands=tuple(given["commands"]),
            inputs=tuple(given["inputs"]),
            targets=tuple(given["targets"]),
            store="" if self.is_plain else given["store"],
            python=_absolute(given["python"], self.environ),
            variables=tuple(given["variables"]),
            salt=given["salt"],
            max_age_s=given["max_age_s"],
            timeout_s=given["timeout_s"],
            wait_s=given["wait_s"],
            cwd=given["cwd"],
        )

    @property
    def most_wait_s(self) -> float:
        """For another process that is at the targets: it may wait for a builder, and then run set-up."""
        return self.spec.wait_s + self.spec.timeout_s

    def known(self) -> Looked:
        """What was seen last, by who needs a key."""
        assert self.looked is not None, "it looks first"
        return self.looked

    # ---- alone at the targets --------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[ExitStack]:
        """At the targets; the stack may be closed before."""
        looked = self.known()
        with ExitStack() as stack:
            self.come_alone(stack, looked.keyed.targets)
            yield stack

    def come_alone(self, stack: ExitStack, targets: list[str]) -> None:
        """Raises: StorageTimeout when another process does not go away; as restore.alone_at."""
        try:
            notes = stack.enter_context(restore.alone_at(targets, environ=self.environ, wait_s=0.0))
        except StorageTimeout:
            self.on_wait(True)
            most_s = self.most_wait_s
            notes = stack.enter_context(restore.alone_at(targets, environ=self.environ, wait_s=most_s))
            self.on_wait(False)
        for note in notes:
            self.say(note)

    def on_wait(self, is_waiting: bool) -> None:
        """For another process that is at the targets."""
        if is_waiting:
            self.say("another process is at the folder of the environment: waiting for it")
        self.tell("waiting" if is_waiting else "waited")

    # ---- telling bootrun -------------------------------------------------------------------------------------

    def tell(self, did: str, **fields: object) -> None:
        """An answer."""
        self._connection.tell(did, **fields)

    def say(self, text: str) -> None:
        """A line for people."""
        if not self._connection.is_gone:
            self.tell("said", text=text)
            return
        try:  # the job is over: who looks for what became of its environment finds the log
            with open(self.log_path, "a", encoding="utf-8") as log:
                log.write(f"bootseer: {text}\n")
        except OSError:
            pass

    def ready(
        self, how: str, tree: str, *, prefix: tuple[str, ...] = (), setup_s: float = 0.0, capture_s: float = 0.0
    ) -> None:
        """The environment is in its place."""
        end_spares()
        self.is_ready = True
        self.tell(
            "ready",
            how=how,
            key="" if self.looked is None else self.looked.keyed.key,
            tree=tree,
            prefix=list(prefix),
            setup_s=setup_s,
            capture_s=capture_s,
            is_publishing=self.is_publishing,
        )

    def unpublished(self, why: str) -> None:
        """What set-up made is in no store."""
        self.tell("unpublished", why=why)


def _absolute(python: str, environ: Mapping[str, str]) -> str:
    """The path of a program that may be a name; "" stays."""
    if not python or python.startswith("/"):
        return python
    found = shutil.which(python, path=environ.get("PATH")) if "/" not in python else None
    return os.path.abspath(found or python)
