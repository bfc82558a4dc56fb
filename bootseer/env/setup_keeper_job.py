"""What all parts of the keeper of an environment share: the job's wishes, what was seen, how bootrun is told.

In: the first order of bootrun (setup_keeper.py), the job's environment as this process has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bootseer.env import restore
from bootseer.env.image_target import folder_of, python_of, with_own_target
from bootseer.env.inside import HERE, Inside, inside_of
from bootseer.env.setup_keeper_look import Looked
from bootseer.env.setup_keeper_mount import end_spares
from bootseer.env.setup_run import setup_environ
from bootseer.env.spec import SetupSpec
from bootseer.env.used_folders import UsedFolder
from bootseer.errors import BootseerError, StorageTimeout
from bootseer.mounts.enter import CANNOT_ENTER
from bootseer.mounts.image_shared import of_node

if TYPE_CHECKING:
    from bootseer.env.setup_keeper import Connection


class Job:
    """One job's environment on one node."""

    def __init__(self, order: Mapping[str, Any], connection: Connection) -> None:
        image = order.get("image")
        self.environ = of_node(dict(os.environ) | ({} if image is None else image["environ"]))
        self._inside = HERE
        self.order = order
        self.is_plain: bool = order["is_plain"]  # set-up is run whatever is kept somewhere
        self.log_path: str = order["log_path"]
        self.peers: str = order.get("peers", "")  # path of the file of the job's peers; "": nobody is asked
        self.looked: Looked | None = None
        self.why_no_key = ""
        self.is_ready = False
        self.is_publishing = False
        self._connection = connection
        self._used: UsedFolder | None = None  # a folder of ours that ranks use

    @property
    def inside(self) -> Inside:
        """Where set-up commands run; of an image once it is open (`enter_image`)."""
        return self._inside

    def enter_image(self, order: Mapping[str, Any]) -> None:
        """The image is open, or open anew."""
        self._inside = inside_of({name: order[name] for name in Inside.__struct_fields__})

    def could_enter(self, status: int | None) -> bool:
        """Whether a set-up command that failed was at least begun, as far as its status tells."""
        return not self._inside.prefix or status != CANNOT_ENTER

    def setup_environ(self, targets: Sequence[str]) -> dict[str, str]:
        """Of set-up commands."""
        return setup_environ(self._inside.environ(self.environ), targets, makes_venv=bool(self.spec.venv_of))

    @cached_property
    def spec(self) -> SetupSpec:
        """Raises: ConfigError, to who asks first."""
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
        # The log is this run's alone on this node, and the same for each keeper of it.
        return with_own_target(spec, image["python"], self.environ, job=self.log_path)

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

    def fell_back(self, why: str) -> None:
        """A line for people as well: something is not done in the way that would be fastest."""
        if self._connection.is_gone:
            self.say(why)
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
        """The environment is in its place.

        Args: imports: hot ones, as the store knows them; seen_by: pid of a process that sees it; 0: this one does.
            mount: where it is told what of it cannot be read, and the socket of who serves it; () where it lies.
        """
        end_spares()
        targets = list(self.spec.targets if self.looked is None else self.looked.keyed.targets)
        self.is_ready = True
        self.use_folder()
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

    def use_folder(self) -> UsedFolder | None:
        """One of ours stays as long as a job uses it: from before it looks, as a mount leaves no trace there."""
        folder = folder_of(self.spec)
        if folder and self._used is None:
            try:
                self._used = UsedFolder(folder)
            except BootseerError as error:
                self.say(f"{folder}: may be taken away while ranks use it: {error}")
        return self._used

    def unpublished(self, why: str) -> None:
        """What set-up made is in no store."""
        self.tell("unpublished", why=why)


def _absolute(python: str, environ: Mapping[str, str]) -> str:
    """The path of a program that may be a name; "" stays."""
    if not python or python.startswith("/"):
        return python
    found = shutil.which(python, path=environ.get("PATH")) if "/" not in python else None
    return os.path.abspath(found or python)
