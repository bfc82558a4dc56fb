"""A node's part in the escalation ladder: post-mortem, checks between attempts, rollback and replay commands.

In: orders of the coordinator. Out: answers, events, log files. A command that fails, hangs or cannot be run costs
its time limit and a log line, never the job.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.health.finding import BAD, Finding
from launcher.base.loop import EventLoop
from launcher.coordinator.escalation import Step, group_size
from launcher.ranks.group import RankGroup, RankState
from launcher.ranks.start_recorder import HelperSpan
from launcher.rendezvous.messages import BadFinding, Examine, Examined, RecoveryResult, RecoveryStep
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from launcher.agent.user_command import CommandResult, UserCommand
    from launcher.health.stop_checks import StopChecks

MAX_FOUND = 64  # findings of a node
MAX_SUSPECTS = 1024
MAX_NAME_CHARS = 256
POST_MORTEM = "post-mortem"


class StepEvents(NamedTuple):
    """Callbacks of the node."""

    answer: Callable[[Examined | RecoveryResult], object]
    say: Callable[[str], object]
    note: Callable[[HelperSpan], object]  # writes events
    note_finding: Callable[[Finding], object]


class NodeSteps:
    """A node's part in the escalation ladder; at most one step at a time."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        run_dir: str,
        folders: list[str],
        unset: tuple[str, ...],
        events: StepEvents,
    ) -> None:
        """Args: run_dir: "" without logs; folders: directories that the job writes to; unset: variables that
        commands do not get."""
        self._loop = loop
        self._spec = spec
        self._run_dir = run_dir
        self._directories = folders
        self._unset = unset
        self._events = events
        self._hook: UserCommand | None = None
        self._step = ""  # the step that runs the hook
        self._next: Callable[[], object] | None = None  # once the hook has ended
        self._checks: StopChecks | None = None

    def examine(self, order: Examine, group: RankGroup) -> None:
        """Hold the ranks of a failed attempt, and run the post-mortem command if the order requests it."""
        group.hold()
        if not order.runs:
            return
        failed = [failure for failure in group.failures if not failure.stopped_by_us]
        alive = [rank for rank in group.ranks if rank.state is RankState.RUNNING]
        variables = {
            "BOOTSEER_FAILED_RANKS": ",".join(str(failure.rank) for failure in failed),
            "BOOTSEER_FAILED_PIDS": ",".join(str(failure.pid) for failure in failed),
            "BOOTSEER_RANK_PIDS": ",".join(f"{rank.rank}:{rank.pid}" for rank in alive),
        }
        command = self._spec.steps.post_mortem if self._spec.steps is not None else ""
        then = partial(self._examined, order)
        self._when_free(partial(self._run, POST_MORTEM, command, order.attempt, order.limit_s, variables, then))

    @property
    def doing(self) -> str:
        """The step in progress, "" for none."""
        if self._checks is not None:
            return Step.CHECKS.value
        return self._step if self._hook is not None else ""

    def end_examination(self) -> None:
        """End a command that still inspects the ranks; the ranks are ended now."""
        if self._hook is not None:
            self._hook.end()

    def recover(self, order: RecoveryStep, page: str, began_ns: int) -> None:
        """Run a step between two attempts. Args: page: path of the failure record, "" for none; began_ns: start of
        the attempt on the monotonic clock; 0: this node took no part in it."""
        if order.step == Step.CHECKS.value:
            self._look(order, began_ns)
            return
        options = self._spec.steps
        variables = {"BOOTSEER_FAILURE_CLASS": order.kind, "BOOTSEER_FAILURE_PAGE": page}
        if order.step == Step.ROLLBACK.value:
            command = options.rollback if options is not None else ""
        else:
            command = options.replay if options is not None else ""
            variables["BOOTSEER_HOSTS"] = self._name_hosts(order)
            variables["BOOTSEER_GROUP_SIZE"] = str(group_size(len(order.hosts)))
        then = partial(self._step_done, order)
        self._when_free(partial(self._run, order.step, command, order.attempt, order.limit_s, variables, then))

    def close(self) -> None:
        self._next = None
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.close()
        self._close_checks()

    def _close_checks(self) -> None:
        checks, self._checks = self._checks, None
        if checks is not None:
            checks.close()

    def _when_free(self, begin: Callable[[], object]) -> None:
        """Call `begin` once the previous step has ended; does not block, so ranks and messages continue."""
        self._close_checks()
        if self._hook is None:
            begin()
        else:
            self._next = begin
            self._hook.end()

    # ---- commands --------------------------------------------------------------------------------------------

    def _run(
        self,
        step: str,
        command: str,
        attempt: int,
        limit_s: float,
        variables: dict[str, str],
        then: Callable[[str, float, CommandResult | None], object],
    ) -> None:
        from launcher.agent.user_command import UserCommand

        self._step = step
        if not command:
            then("this node was started without that command: give it to all nodes", 0.0, None)
            return
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        environ |= {
            "BOOTSEER_STEP": step,
            "BOOTSEER_RUN_ID": self._spec.run_id,
            "BOOTSEER_ATTEMPT": str(attempt),
            "BOOTSEER_RUN_DIR": self._run_dir,
            **variables,
        }
        log_path = f"{self._run_dir}/{step}-{attempt}.log" if self._run_dir else ""
        began_ns = time.monotonic_ns()
        over = partial(self._over, step, began_ns, limit_s, then)
        try:
            self._hook = UserCommand(self._loop, command, environ, log_path, limit_s, over)
        except OSError as error:
            then(f"it cannot be run: {error.strerror}", 0.0, None)

    def _over(
        self,
        step: str,
        began_ns: int,
        limit_s: float,
        then: Callable[[str, float, CommandResult | None], object],
        outcome: CommandResult,
    ) -> None:
        self._hook = None
        text = outcome.describe(limit_s)
        facts = {"status": outcome.status, "is_late": outcome.is_late}
        error = "" if outcome.is_well else text
        name = step.replace("-", "_")
        self._events.note(HelperSpan(name, began_ns, time.monotonic_ns(), facts, error))
        then(text, outcome.seconds, outcome)
        begin, self._next = self._next, None
        if begin is not None:
            begin()

    def _examined(self, order: Examine, text: str, took_s: float, _outcome: CommandResult | None) -> None:
        self._events.say(f"{POST_MORTEM}: {text}")
        self._events.answer(Examined(order.attempt, took_s, f"{POST_MORTEM}: {text}"))

    def _step_done(self, order: RecoveryStep, text: str, took_s: float, outcome: CommandResult | None) -> None:
        suspects: tuple[str, ...] = ()
        if outcome is not None and order.step == Step.REPLAY.value:
            suspects = find_suspects(outcome.tail)
            text += f"; it names {', '.join(suspects[:8])}" if suspects else "; it names no machine"
        is_well = outcome is not None and outcome.is_well
        self._events.answer(RecoveryResult(order.attempt, order.step, is_well, took_s, text, (), suspects))

    def _name_hosts(self, order: RecoveryStep) -> str:
        """Return the argument of `bootseer replay --hosts`: a file, or a list without a log directory."""
        if self._run_dir:
            path = f"{self._run_dir}/hosts-{order.attempt}.txt"
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.writelines(f"{host}\n" for host in order.hosts)
                return path
            except OSError as error:
                self._events.say(f"warning: the hosts of the job cannot be written to {path}: {error.strerror}")
        return ",".join(order.hosts)

    # ---- checks ----------------------------------------------------------------------------------------------

    def _look(self, order: RecoveryStep, began_ns: int) -> None:
        self._when_free(partial(self._look_now, order, began_ns))

    def _look_now(self, order: RecoveryStep, began_ns: int) -> None:
        from launcher.health.stop_checks import StopChecks

        now_ns = time.monotonic_ns()
        hours = (now_ns - began_ns) / 3.6e12 if began_ns else 1.0
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        looked = partial(self._checks_done, order, now_ns)
        try:
            self._checks = StopChecks(
                self._loop, self._directories, environ, hours, order.limit_s, looked, self._spec.check_options
            )
        except OSError as error:
            text = f"the checks cannot be run: {error.strerror}"
            self._events.answer(RecoveryResult(order.attempt, order.step, False, 0.0, text))

    def _checks_done(self, order: RecoveryStep, began_ns: int, findings: list[Finding], is_whole: bool) -> None:
        self._checks = None
        ended_ns = time.monotonic_ns()
        for found in findings:
            self._events.note_finding(found)
        bad = [found for found in findings if found.level in BAD]
        told = tuple(BadFinding(each.check, each.line()) for each in bad[:MAX_FOUND])
        text = f"{len(bad)} failed: {bad[0].line()}" if bad else "in order" if is_whole else "cut off"
        facts = {"failed": len(bad), "not_in_order": len(findings)}
        self._events.note(
            HelperSpan("stop_checks", began_ns, ended_ns, facts, text if bad or not is_whole else "")
        )
        took_s = (ended_ns - began_ns) / 1e9
        self._events.answer(RecoveryResult(order.attempt, order.step, is_whole, took_s, text, told))


def find_suspects(text: str) -> tuple[str, ...]:
    """Return the machine that a replay has named, () for none. It is in the last JSON line of `bootseer replay
    --json`: {"found": "one", "suspects": [...]}."""
    for line in reversed(text.splitlines()):
        try:
            record: Any = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(suspects := record.get("suspects"), list):
            names = [each for each in suspects if isinstance(each, str) and 0 < len(each) <= MAX_NAME_CHARS]
            return tuple(names[:MAX_SUSPECTS]) if record.get("found") == "one" else ()
    return ()
