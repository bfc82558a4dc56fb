"""Shared state of the parts of the environment service: the job's order, the lookup result, answers to bootrun.

In: the first order of bootrun (main.py), the job's environment variables in this process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bootseer.env.capture.bytecode import python_of
from bootseer.env.exec_place import HERE, ExecPlace, inside_of
from bootseer.env.restore import restore
from bootseer.env.restore.used_directories import UsedDirectory
from bootseer.env.service.commands import setup_environ
from bootseer.env.service.image_target import directory_of, with_own_target
from bootseer.env.service.look import LookupResult
from bootseer.env.service.mount import end_spares
from bootseer.env.spec import SetupSpec
from bootseer.errors import BootseerError, StorageTimeout
from bootseer.logs import get_logger
from bootseer.mounts.sandbox.enter import CANNOT_ENTER
from bootseer.mounts.sandbox.shared import of_node

if TYPE_CHECKING:
    from bootseer.env.connection import Connection

_log = get_logger(__name__)


class Job:
    """The environment of one job on one node."""

    def __init__(self, order: Mapping[str, Any], connection: Connection) -> None:
        image = order.get("image")
        self.environ = of_node(dict(os.environ) | ({} if image is None else image["environ"]))
        self._inside = HERE
        self.order = order
        self.is_plain: bool = order["is_plain"]  # set-up is run in any case; stored environments are ignored
        self.log_path: str = order["log_path"]
        self.peers: str = order.get("peers", "")  # path of the file of the job's peers; "": no peers
        self.looked: LookupResult | None = None
        self.why_no_key = ""
        self.is_ready = False
        self.is_publishing = False
        self._connection = connection
        self._used: UsedDirectory | None = None  # a directory of Bootseer that ranks use

    @property
    def inside(self) -> ExecPlace:
        """Where set-up commands run: in the image once it is open (`enter_image`)."""
        return self._inside

    def enter_image(self, order: Mapping[str, Any]) -> None:
        """Set the open, or reopened, image."""
        self._inside = inside_of({name: order[name] for name in ExecPlace.__struct_fields__})

    def could_enter(self, status: int | None) -> bool:
        """Return whether a failed set-up command was at least started, judged by its status."""
        return not self._inside.prefix or status != CANNOT_ENTER

    def setup_environ(self, targets: Sequence[str]) -> dict[str, str]:
        """Return the variables of set-up commands."""
        return setup_environ(self._inside.environ(self.environ), targets, makes_venv=bool(self.spec.venv_of))

    @cached_property
    def spec(self) -> SetupSpec:
        """The spec of the job. Raises: ConfigError on first use."""
        given, image = self.order["spec"], self.order.get("image")
        spec = SetupSpec(
            commands=tuple(given["commands"]),
            inputs=tuple(given["inputs"]),
            targets=tuple(given["targets"]),
            store="" if self.is_plain else given["store"],
            python="" if image is not None else _absolute(given["python"], self.environ),
            variables=tuple(given["variables"]),
            salt=given["salt"],
            max_age_s=given["max_age_s"],
            timeout_s=given["timeout_s"],
            wait_s=given["wait_s"],
            cwd=given["cwd"],
            in_image=image is not None,
            image="" if image is None else image["digest"],
        )
        if image is None or spec.targets:
            return spec
        # The log path belongs to this run on this node, and is the same for each service process of it.
        return with_own_target(spec, image["python"], self.environ, job=self.log_path)

    @property
    def max_wait_s(self) -> float:
        """Maximum wait for another process at the targets, which may wait for a builder and run set-up itself."""
        return self.spec.wait_s + self.spec.timeout_s

    def known(self) -> LookupResult:
        assert self.looked is not None, "the lookup comes first"
        return self.looked

    # ---- exclusive access ------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[ExitStack]:
        """Hold exclusive access to the targets; the stack may be closed earlier."""
        looked = self.known()
        with ExitStack() as stack:
            self.acquire_exclusive(stack, looked.keyed.targets)
            yield stack

    def acquire_exclusive(self, stack: ExitStack, targets: list[str]) -> None:
        """Acquire exclusive access. Raises: StorageTimeout if another process stays; as restore.exclusive_at."""
        try:
            notes = stack.enter_context(restore.exclusive_at(targets, environ=self.environ, wait_s=0.0))
        except StorageTimeout:
            self.on_wait(True)
            max_s = self.max_wait_s
            notes = stack.enter_context(restore.exclusive_at(targets, environ=self.environ, wait_s=max_s))
            self.on_wait(False)
        for note in notes:
            _log.line(note)

    def on_wait(self, is_waiting: bool) -> None:
        """Report that waiting for another process begins (True) or ends."""
        if is_waiting:
            _log.info("waiting for another process that is modifying the environment")
        self.tell("waiting" if is_waiting else "waited")

    # ---- answers to bootrun -------------------------------------------------------------------------------------

    def tell(self, did: str, **fields: object) -> None:
        """Send an answer."""
        self._connection.tell(did, **fields)

    def say(self, text: str) -> None:
        """Report a line to the user."""
        if not self._connection.is_gone:
            self.tell("said", text=text)
            return
        try:  # the job has ended: the log is where users can find the line
            with open(self.log_path, "a", encoding="utf-8") as log:
                log.write(f"bootseer: {text}\n")
        except OSError:
            pass

    def fell_back(self, why: str) -> None:
        """Report a fallback, which the user sees as a line, too."""
        if self._connection.is_gone:
            _log.line(why)
        else:
            self.tell("fell-back", why=why)

    def ready(
        self,
        how: str,
        tree: str,
        *,
        prefix: tuple[str, ...] = (),
        imports: Sequence[str] = (),
        seen_by: int = 0,
        mount: Sequence[str] = (),
        setup_s: float = 0.0,
        capture_s: float = 0.0,
    ) -> None:
        """Report that the environment is in place.

        Args: imports: recorded imports of the store. seen_by: pid of a process that sees the environment; 0: this
            one. mount: path of the list of failed reads, and socket of the daemon; () if not mounted.
        """
        end_spares()
        targets = list(self.spec.targets if self.looked is None else self.looked.keyed.targets)
        self.is_ready = True
        self.use_directory()
        self.tell(
            "ready",
            how=how,
            key="" if self.looked is None else self.looked.keyed.key,
            tree=tree,
            prefix=list(prefix),
            mount=list(mount),
            imports=list(imports),
            targets=targets,
            python=python_of(targets, seen_by) if self.spec.in_image else "",
            setup_s=setup_s,
            capture_s=capture_s,
            is_publishing=self.is_publishing,
        )

    def use_directory(self) -> UsedDirectory | None:
        """Mark Bootseer's own directory as used, before the lookup, as a mount leaves no trace there."""
        directory = directory_of(self.spec)
        if directory and self._used is None:
            try:
                self._used = UsedDirectory(directory)
            except BootseerError as error:
                _log.info("%s: may be removed while ranks use it: %s", directory, error)
        return self._used

    def unpublished(self, why: str) -> None:
        """Report that the result of set-up is in no store."""
        self.tell("unpublished", why=why)


def _absolute(python: str, environ: Mapping[str, str]) -> str:
    """Return the absolute path of a program given by path or name; "" stays."""
    if not python or python.startswith("/"):
        return python
    found = shutil.which(python, path=environ.get("PATH")) if "/" not in python else None
    return os.path.abspath(found or python)
