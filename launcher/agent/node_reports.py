"""What the coordinator reports to a node for its user: hangs, broken rules, the end of a failed job.

In: messages of the coordinator. Out: lines on the console, files in the log directory, events. Imported when the
first report arrives.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launcher.agent.node_files import NodeEvents, RunDirectories
from launcher.base.loop import EventLoop
from launcher.ranks.output.console import Console
from launcher.rendezvous.messages import Failure, Finish, HangReport, RuleReport

if TYPE_CHECKING:
    from launcher.agent.node_status import Reported


class NodeReports:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        console: Console,
        complain: Callable[[str], object],
        directories: RunDirectories,
        events: NodeEvents,
    ) -> None:
        """Args: complain: prints an error in one line."""
        self._loop = loop
        self._console = console
        self._complain = complain
        self._directories = directories
        self._events = events
        self.hang: Reported | None = None  # the last one

    def show_hang(self, found: HangReport) -> None:
        """Save the report of a hang, print it, and write an event: only the node with rank 0 gets it."""
        from launcher.agent.node_status import Reported
        from launcher.monitor.node_watch import SHOWN_LINES, write_hang_report

        run_dir, name = self._directories.run, ""
        try:
            path = write_hang_report(run_dir, found)
            name, kept = os.path.basename(path), f" ({path})"
        except OSError as error:
            kept = f" (report not saved in {run_dir}: {error.strerror})"
        lines = found.text.rstrip().splitlines()
        self.hang = Reported(found.attempt, lines[0], self._loop.time())
        self._complain(lines[0] + kept)
        attrs: dict[str, Any] = {"report": name}
        self._events.instant("", "hang", error=lines[0], attempt=found.attempt, **attrs)
        for line in lines[1:SHOWN_LINES]:
            self._console.show(f"  {line}\n")

    def show_rule(self, told: RuleReport, *, is_first_node: bool) -> None:
        """Print that a log rule was broken, and write an event on the node with rank 0."""
        self._complain(told.text)
        if is_first_node:
            # Not as the event's rank: that rank can be on another node.
            attrs: dict[str, Any] = {"rule": told.rule, "class": told.kind, "action": told.action}
            if told.rank >= 0:
                attrs["of_rank"] = told.rank
            self._events.instant("", "rule_broken", error=told.text, attempt=told.attempt, **attrs)

    def show_end(self, finish: Finish, script: str, attempt: int, record: str, world_size: int) -> None:
        """Print the final report of a failed job, and write the error file for an outer launcher.

        Args: record: path of the last failure record, "" for none; world_size: of the last attempt, 0: none.
        """
        self._complain(finish.reason)
        first = next((failure for failure in finish.failures if not failure.stopped_by_us), None)
        if first is None:
            return
        from launcher.ranks.report import format_report

        self._console.show(
            format_report(script, finish.failures, finish.unsure, attempt, finish.lost, record, world_size)
        )
        own_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if own_file:
            self._write_own_error_file(own_file, first)

    def _write_own_error_file(self, path: str, first: Failure) -> None:
        from launcher.ranks.error_file import read_error_file, write_own_error_file

        record = read_error_file(first.error_file)
        trouble = write_own_error_file(path, record, first.status, first.message, first.wall_s)
        if trouble:
            self._complain(trouble)
