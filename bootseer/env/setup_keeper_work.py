"""What the keeper of an environment does with its orders: looks, then has it fetched and shown, or built.

In: orders of bootrun (setup_keeper.py), the job's environment as this process has it. Out: answers. A set-up
command that fails is the job's error; whatever else fails costs only the time that set-up takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bootseer.env.image_target import remove_old
from bootseer.env.setup_keeper_build import Builder
from bootseer.env.setup_keeper_fetch import Fetcher
from bootseer.env.setup_keeper_job import Job
from bootseer.env.setup_keeper_look import look
from bootseer.env.setup_keeper_orders import AbandonedError, Orders
from bootseer.env.setup_keeper_plain import described, ends_job, plain_targets
from bootseer.env.setup_keeper_run import Runner
from bootseer.errors import BootseerError, SetupFailed

if TYPE_CHECKING:
    from bootseer.env.setup_keeper import Connection
    from bootseer.mounts.holder import Holder


class Work:
    """One job's environment on one node; `run` until bootrun has gone."""

    def __init__(self, order: Mapping[str, Any], connection: Connection, holder: Holder | None) -> None:
        self._job = Job(order, connection)
        self._orders = Orders(connection, self._job.enter_image)
        self._fetcher = Fetcher(self._job, self._orders, holder)
        self._runner = Runner(self._job)
        self._builder = Builder(self._job, self._runner)
        self._has_no_key = False  # set-up can only be run

    @property
    def is_publishing(self) -> bool:
        """Then this process outlives its job."""
        return self._job.is_publishing

    def run(self) -> None:
        """Looks, then does what it is told."""
        try:
            self._look()
            while True:
                order = self._orders.take(self._fetcher.see_to_mount)
                if order is None:
                    return
                try:
                    self._obey(order)
                except AbandonedError:
                    if self._orders.is_over():
                        return
                except (BootseerError, OSError) as error:
                    if ends_job(error):
                        raise
                    self._go_on_without(order, described(error))
        except SetupFailed as error:
            self._fail(str(error), error.tail, could_enter=self._job.could_enter(error.status))
        except (BootseerError, OSError) as error:
            self._fail(described(error))
        finally:
            self._fetcher.unmount()

    def give_up(self) -> None:
        """From another thread: this process is about to end, and others need not wait for it."""
        self._builder.give_up()

    def _look(self) -> None:
        job = self._job
        spec = job.spec
        if job.order.get("is_bare"):
            self._has_no_key = True
            job.tell("looked", key="", tree="", why=job.order["why_plain"], is_silent=False)
            return
        try:
            job.looked = found = look(
                spec,
                job.environ,
                job.say,
                job.most_wait_s,
                job.on_wait,
                job.fell_back,
                job.use_folder(),
                job.order.get("damaged", ""),
            )
        except (BootseerError, OSError) as error:
            if ends_job(error):
                raise
            plain_targets(spec, job.environ)  # there is something to be set up, or this says why not
            self._has_no_key, job.why_no_key = True, described(error)
            job.fell_back(f"{job.why_no_key}; set-up is run, and what it does is not kept")
            job.tell("looked", key="", tree="", why=job.why_no_key, is_silent=False)
            return
        why = job.order["why_plain"] if job.is_plain else found.cannot
        job.tell("looked", key=found.keyed.key, tree=found.tree, why=why, is_silent=found.is_silent)

    def _obey(self, order: dict[str, Any]) -> None:
        self._job.is_ready = self._job.is_ready and order["do"] in ("first-step", "touched")
        if order["do"] == "first-step":
            self._end_start()
            return
        if order["do"] == "touched":
            if not self._has_no_key:
                self._builder.share_recording(order["files"], order["imports"])
            return
        if self._has_no_key:
            self._go_on_without(order, "")
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

    def _go_on_without(self, order: Mapping[str, Any], why: str) -> None:
        """Without what keeps environments: an order is carried out as far as it can be. `why`: if it is not known.

        Raises: SetupFailed, and what else ends the job.
        """
        what = order["do"]
        if self._job.is_ready:
            self._job.say(f"warning: the environment is not kept: {why}")
            if what == "build":
                self._job.unpublished(why)
        elif what in ("own", "again", "build"):
            self._runner.run_plainly(why)
            if what == "build":
                self._job.unpublished(why)
        elif what == "use":
            self._fetcher.unmount()
            self._job.tell("unfetched", why=why or "it cannot be told which one it is")

    def _fail(self, why: str, tail: tuple[str, ...] = (), *, could_enter: bool = True) -> None:
        self._job.tell("failed", why=why, tail=list(tail), could_enter=could_enter)
