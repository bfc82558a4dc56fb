"""Processing of orders by the environment service: lookup, then fetching and showing, or building.

In: orders of bootrun (main.py), the job's environment variables in this process. Out: answers. A failed
set-up command is an error of the job. Any other failure costs only the time of set-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bootseer.env.service.fetch import Fetcher
from bootseer.env.service.image_target import remove_old
from bootseer.env.service.job import Job
from bootseer.env.service.look import look_up
from bootseer.env.service.orders import InterruptedByOrderError, Orders
from bootseer.env.service.plain import error_line, is_user_error, plain_targets
from bootseer.errors import BootseerError, SetupFailed
from bootseer.logs import get_logger

if TYPE_CHECKING:
    from bootseer.env.connection import Connection
    from bootseer.env.service.build import Builder
    from bootseer.env.service.run import Runner
    from bootseer.mounts.sandbox.process import ImageSandbox

_log = get_logger(__name__)


class EnvService:
    """The environment of one job on one node; `run` processes orders until bootrun closes the connection."""

    def __init__(self, order: Mapping[str, Any], connection: Connection, sandbox: ImageSandbox | None) -> None:
        self._job = Job(order, connection)
        self._orders = Orders(connection, self._job.enter_image)
        self._fetcher = Fetcher(self._job, self._orders, sandbox)
        self._has_no_key = False  # only plain set-up is possible

    # Modules of set-up are half of what this process imports, and a node that finds its environment runs none.

    @cached_property
    def _runner(self) -> Runner:
        from bootseer.env.service.run import Runner

        return Runner(self._job)

    @cached_property
    def _builder(self) -> Builder:
        from bootseer.env.service.build import Builder

        return Builder(self._job, self._runner)

    @property
    def is_publishing(self) -> bool:
        """Whether a publication is in progress, so that this process outlives its job."""
        return self._job.is_publishing

    def run(self) -> None:
        """Look up the environment, then process orders."""
        try:
            self._look()
            while True:
                order = self._orders.take(self._fetcher.check_mount)
                if order is None:
                    return
                try:
                    self._process(order)
                except InterruptedByOrderError:
                    if self._orders.is_over():
                        return
                except (BootseerError, OSError) as error:
                    if is_user_error(error):
                        raise
                    self._run_without_store(order, error_line(error))
        except SetupFailed as error:
            self._fail(str(error), error.tail, could_enter=self._job.could_enter(error.status))
        except (BootseerError, OSError) as error:
            self._fail(error_line(error))
        finally:
            self._fetcher.unmount()

    def say(self, line: str) -> None:
        """Report a line to the user; this process logs with it."""
        self._job.say(line)

    def give_up(self) -> None:
        """Release the lease from another thread before this process ends, so that other nodes stop waiting."""
        if "_builder" in vars(self):
            self._builder.give_up()

    def _look(self) -> None:
        job = self._job
        spec = job.spec
        if job.order.get("is_bare"):
            self._has_no_key = True
            job.tell("looked", key="", tree="", why=job.order["why_plain"], is_silent=False)
            return
        try:
            job.looked = found = look_up(
                spec,
                job.environ,
                job.max_wait_s,
                job.on_wait,
                job.fell_back,
                job.use_directory(),
                job.order.get("damaged", ""),
            )
        except (BootseerError, OSError) as error:
            if is_user_error(error):
                raise
            plain_targets(spec, job.environ)  # raises if there is nothing to set up
            self._has_no_key, job.why_no_key = True, error_line(error)
            job.fell_back(f"{job.why_no_key}; set-up is run, and its result is not stored")
            job.tell("looked", key="", tree="", why=job.why_no_key, is_silent=False)
            return
        why = job.order["why_plain"] if job.is_plain else found.cannot
        job.tell("looked", key=found.keyed.key, tree=found.tree, why=why, is_silent=found.is_silent)

    def _process(self, order: dict[str, Any]) -> None:
        self._job.is_ready = self._job.is_ready and order["do"] in ("first-step", "touched")
        if order["do"] == "first-step":
            self._end_start()
            return
        if order["do"] == "touched":
            if not self._has_no_key:
                self._builder.publish_trace(order["files"], order["imports"])
            return
        if self._has_no_key:
            self._run_without_store(order, "")
            return
        match order["do"]:
            case "use":
                self._fetcher.use(order["tree"])
            case "build":
                self._builder.build(is_urgent=order["is_urgent"], damaged=order.get("damaged", ""))
            case "own" | "again":
                self._fetcher.unmount()
                self._builder.own(is_again=order["do"] == "again")

    def _end_start(self) -> None:
        self._fetcher.end_start()
        if self._job.spec.venv_of:
            remove_old(self._job.environ)

    def _run_without_store(self, order: Mapping[str, Any], why: str) -> None:
        """Process an order without stored environments, as far as possible. Args: why: the reason, if it is new.

        Raises: SetupFailed, and other errors that end the job.
        """
        what = order["do"]
        if self._job.is_ready:
            _log.warning("the environment is not stored: %s", why)
            if what == "build":
                self._job.unpublished(why)
        elif what in ("own", "again", "build"):
            self._runner.run_plainly(why)
            if what == "build":
                self._job.unpublished(why)
        elif what == "use":
            self._fetcher.unmount()
            self._job.tell("unfetched", why=why or "its key is unknown")

    def _fail(self, why: str, tail: tuple[str, ...] = (), *, could_enter: bool = True) -> None:
        self._job.tell("failed", why=why, tail=list(tail), could_enter=could_enter)
