"""A warning about an endpoint on a loopback address: each node on another host would consider itself the host."""

from __future__ import annotations

from collections.abc import Callable

from launcher.base.loop import EventLoop

ALONE_S = 1.0  # for another node on this host to join


class LoopbackWarning:
    """Warns once if no other node joins a job whose endpoint reaches only this host."""

    def __init__(
        self,
        loop: EventLoop,
        place: str,
        flag: str,
        is_alone: Callable[[], bool],
        say: Callable[[str], object],
    ) -> None:
        """Args: place: the endpoint, for users; flag: that sets it; is_alone: whether no other node has joined."""
        self._loop = loop
        self._place = place
        self._flag = flag
        self._is_alone = is_alone
        self._say = say
        self._is_planned = False

    def plan(self) -> None:
        """Warn soon, unless another node joins."""
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_later(ALONE_S, self._warn)

    def _warn(self) -> None:
        if self._is_alone():
            self._say(
                f"warning: the endpoint {self._place} reaches only this host, and no other node joined: nodes on "
                "other hosts cannot connect; give all nodes the name or address of one host with "
                f"{self._flag}"
            )
