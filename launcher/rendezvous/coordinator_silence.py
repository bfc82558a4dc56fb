"""PURE: the silence of the coordinator, at a node that has joined: the coordinator or the network hangs.

In: how long it lasts, and whether the coordinator's machine answers. Out: lines for users, and when the node gives
up. Ranks need neither the coordinator nor this network, so they continue meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

# An unreachable coordinator is retried for this multiple of the silence that heartbeats allow.
PATIENCE = 4


class CoordinatorSilence:
    def __init__(
        self, place: str, max_silence_s: float, join_timeout_s: float, say: Callable[[str], object]
    ) -> None:
        """Args: place: the endpoint, for users; max_silence_s: the silence that heartbeats allow."""
        self._place = place
        self._unreachable_s = PATIENCE * max_silence_s
        self._hanging_s = max(self._unreachable_s, join_timeout_s)
        self._say = say
        self._is_reported = False

    def judge(self, silence_s: float, *, is_there: bool) -> str:
        """Report a silence, once. Returns: why the node gives up, "" while it waits.

        Args: is_there: the coordinator's machine answers.
        """
        if not self._is_reported:
            self._is_reported = True
            where = "although its machine answers" if is_there else "and its machine does not answer"
            self._say(
                f"warning: no message from the coordinator at {self._place} for {silence_s:.0f} s, {where}; "
                "the ranks of this node continue"
            )
        if is_there:
            if silence_s >= self._hanging_s:
                return f"no message from the coordinator at {self._place} for {silence_s:.0f} s"
        elif silence_s >= self._unreachable_s:
            return f"the coordinator at {self._place} was unreachable for {silence_s:.0f} s"
        return ""

    def ended(self) -> None:
        """Report that a reported silence is over."""
        if self._is_reported:
            self._is_reported = False
            self._say("the coordinator is reachable again")
