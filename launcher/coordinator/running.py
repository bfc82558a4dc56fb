"""PURE: the watch over running ranks at the coordinator: failures, hangs, and rules over their output.

In: reports of nodes, the time. Out: reports to nodes, and why the attempt must end. Iterators of reasons are lazy:
the caller ends the attempt at each reason, and later reports follow from that.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Iterable, Iterator, NamedTuple
from launcher.coordinator.attempt import AttemptEnd, describe_failure
from launcher.coordinator.state import JobState, Phase
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.base.facts import RankFacts
    from launcher.monitor.watch import HangWatch, WatchMessage
    from launcher.rules.job_watch import JobRuleFinding, RuleWatch

SAME_ERROR_WAIT_S = 0.4  # after an error of the code, for the other ranks to reach the same line


class _SameErrorWait(NamedTuple):
    """A failed rank, while the coordinator waits for others that may fail alike."""

    end: AttemptEnd
    place: str  # of the error
    until_s: float
    ranks: int  # of the attempt


class RunningRanks:
    """The watch over the ranks of one job, in all its attempts."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._rules, self._nodes, self._outbox = state.rules, state.nodes, state.outbox
        self._hangs: HangWatch | None = None  # from the first sample on
        self._output: RuleWatch | None = None  # from the first finding on, or with rules about any rank
        self._alike: _SameErrorWait | None = None
        self.verdict: tuple[int, str] | None = None  # of a log rule: exit status of the job, and why

    def attempt_began(self, nodes: int, now_s: float) -> None:
        """Watch the ranks of a new attempt. Args: nodes: how many take part."""
        if self._rules.log_rules or self._output is not None:
            self._take_output().attempt_began(nodes)
        if self._hangs is not None:
            self._begin_hangs(self._hangs, now_s)

    def attempt_ends(self) -> None:
        """Wait for no further failures: the attempt ends."""
        self._alike = None

    def node_succeeded(self, number: int) -> None:
        if self._hangs is not None:
            self._hangs.node_ended(number)
        if self._output is not None:
            self._output.ranks_ended()

    def deadlines_s(self) -> list[float | None]:
        """Return when to call `tick` and `tick_output`."""
        hangs_s = None if self._hangs is None else self._hangs.deadline_s()
        output_s = None if self._output is None else self._output.deadline_s()
        return [hangs_s if self._alike is None else self._alike.until_s, output_s]

    # ---- failures --------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether a rank has failed, and others may fail alike."""
        return self._alike is not None

    def rank_failed(self, number: int, failure: messages.Failure, now_s: float) -> Iterator[AttemptEnd]:
        """Handle a failed rank; end the attempt, or wait a moment if all ranks may fail at the same line."""
        place = ""
        if not self._rules.steps.post_mortem_s and self._rules.on_hang != "off":
            from launcher.ranks.failure_class import certain_user_error

            place = certain_user_error(failure)
        if self._alike is None:
            end = AttemptEnd(describe_failure(failure), number)
            self._alike = _SameErrorWait(end, place, now_s + SAME_ERROR_WAIT_S, self._nodes.count_ranks())
        has_stepped = self._hangs is not None and self._hangs.has_stepped
        is_alike = place != "" and place == self._alike.place and not has_stepped
        yield from self._conclude_wait(self._alike, is_alike, now_s)

    def _conclude_wait(self, alike: _SameErrorWait, may_wait: bool, now_s: float) -> Iterator[AttemptEnd]:
        """End the attempt after a failure, unless others may still fail at the same line.

        An error of the code in all ranks blames no rank, but stopped ranks cannot show it. Do not wait after the
        first step: such errors mostly occur before it.
        """
        attempt = self._state.attempt
        if may_wait and now_s < alike.until_s and len(attempt.failures.ranks) < alike.ranks:
            return
        attempt.waited_s = now_s - (alike.until_s - SAME_ERROR_WAIT_S)
        yield alike.end

    def tick(self, now_s: float) -> Iterator[AttemptEnd]:
        """Act on the time: end the wait after a failure, or look for hangs."""
        if self._alike is not None:
            yield from self._conclude_wait(self._alike, True, now_s)
        elif self._hangs is not None:
            yield from self._report_hangs(self._hangs.tick(now_s), now_s)

    # ---- hangs -----------------------------------------------------------------------------------------------

    @property
    def hang_lasts(self) -> bool:
        """Whether a reported hang has not ended."""
        return self._hangs is not None and self._hangs.last is not None

    def newest_facts(self) -> list[tuple[str, RankFacts]]:
        """Return the newest facts of each rank, with the name of its node, by rank; [] before the first sample."""
        found = [] if self._hangs is None else self._hangs.newest()
        nodes = self._nodes.placed()
        is_unique = len({node.join.host for node in nodes.values()}) == len(nodes)
        names = {
            number: node.join.host if is_unique else f"{node.join.host} (node {node.place})"
            for number, node in nodes.items()
        }
        return [(names[number], facts) for number, facts in found if number in names]

    def node_sampled(self, number: int, facts: tuple[RankFacts, ...], now_s: float) -> Iterator[AttemptEnd]:
        if self._hangs is None:
            from launcher.monitor.hang.settings import HangSettings
            from launcher.monitor.watch import HangWatch

            limits = self._rules.limits()
            settings = HangSettings(
                min_s=self._rules.hang_least_s,
                first_s=limits.hang_first_s,
                busy_s=limits.hang_busy_s,
                working_s=limits.hang_working_s,
                stacks_s=limits.hang_stacks_s,
            )
            self._hangs = HangWatch(settings)
            self._begin_hangs(self._hangs, now_s)
        yield from self._report_hangs(self._hangs.looked(number, facts, now_s), now_s)

    def node_answered(self, number: int, answer: messages.NodeStacks, now_s: float) -> Iterator[AttemptEnd]:
        """Handle a node's answer to a query for stacks."""
        if self._hangs is not None:
            yield from self._report_hangs(self._hangs.answered(number, *answer), now_s)

    def _begin_hangs(self, hangs: HangWatch, now_s: float) -> None:
        hangs.attempt_began(self._nodes.count_ranks(), len(self._nodes.placed()), now_s)

    def _report_hangs(self, said: Iterable[WatchMessage], now_s: float) -> Iterator[AttemptEnd]:
        """Request stacks, report hangs, and end the attempt if requested."""
        from launcher.monitor.watch import StackQuery

        outbox = self._outbox
        for each in said:
            attempt, placed = self._state.attempt, self._nodes.placed()
            if isinstance(each, StackQuery):
                for number in placed:
                    outbox.send(number, messages.WantStacks(attempt.number, each.number))
                continue
            for number, node in placed.items():
                if node.place == 0:
                    outbox.send(number, messages.HangReport(attempt.number, each.number, each.text, each.data))
                else:
                    outbox.send(number, messages.Note(each.line))
            hang = self._hangs.last if self._hangs is not None else None
            is_ended = self._rules.on_hang == "restart" and self._state.phase is Phase.RUNNING
            is_ended &= hang is None or not hang.is_early
            if hang is not None:
                records = self._state.records
                page = records.take_notes().hang_reported(attempt.number, hang, each, is_ended, now_s)
                if page is not None:
                    records.keep(page)
            if is_ended:
                attempt.end_reason, attempt.end_class = each.line, "hang"
                yield AttemptEnd(each.line)

    # ---- rules over the output of ranks ----------------------------------------------------------------------

    def _take_output(self) -> RuleWatch:
        if self._output is None:
            from launcher.rules.job_watch import RuleWatch

            self._output = RuleWatch(self._rules.log_rules)
        return self._output

    def rule_fired(self, fired: messages.RuleFired, now_s: float) -> Iterator[AttemptEnd]:
        """Handle a rule that the output of a node's rank has matched."""
        from launcher.rules.job_watch import JobRuleFinding

        finding = JobRuleFinding(fired.rule, fired.kind, fired.action, fired.rank, fired.text)
        yield from self._report_rules([finding], now_s)

    def rule_observed(self, observed: messages.RuleObservation, now_s: float) -> None:
        """Handle what a node has observed for a rule about any rank."""
        if self._output is not None:
            self._output.seen(observed.rule, observed.what, now_s)

    def tick_output(self, now_s: float) -> Iterator[AttemptEnd]:
        """Act on the time: find lines that are late."""
        if self._output is not None:
            yield from self._report_rules(self._output.tick(now_s), now_s)

    def _report_rules(self, broken: Iterable[JobRuleFinding], now_s: float) -> Iterator[AttemptEnd]:
        """Report matched rules, and apply their actions."""
        for each in broken:
            attempt = self._state.attempt
            if self._take_output().is_news(each):
                told = messages.RuleReport(attempt.number, each.rule, each.kind, each.action, each.rank, each.line)
                for number in self._nodes.placed():
                    self._outbox.send(number, told)
            if each.action in ("give-up", "stop") and self.verdict is None:
                status = self._rules.give_up_status if each.action == "give-up" else 1
                self.verdict = status, each.line
            if self._state.phase is Phase.RUNNING and each.action in ("restart", "give-up", "stop"):
                attempt.end_reason, attempt.end_class = each.line, each.kind or "rule"
                self._state.records.take_notes().rule_broken(attempt.end_class, each.line, each.rank, now_s)
                yield AttemptEnd(each.line)
