"""A job on several nodes: joins agent, link, coordinator and environment identity of this node.

Imported only when there is an endpoint; a job on one node never loads msgspec or opens a socket for it.
"""

from __future__ import annotations

from launcher.agent import Agent
from launcher.guard_client import GuardClient
from launcher.job import Job
from launcher.loop import EventLoop
from launcher.ranks.console import Console
from launcher.rendezvous.host import JobHost
from launcher.rendezvous.identity import IdentityProbe
from launcher.rendezvous.link import Link
from launcher.rendezvous.member import RendezvousSettings, open_link
from launcher.rendezvous.messages import Environment, FromCoordinator, Identity, Join, WantEnvironment
from launcher.spec import LaunchSpec


class Networked:
    """Connects one agent; lives as long as the job."""

    def __init__(
        self, loop: EventLoop, console: Console, spec: LaunchSpec, agent: Agent, guard: GuardClient
    ) -> None:
        self._loop = loop
        self._console = console
        self._spec = spec
        self._agent = agent
        self._guard = guard
        self._probe: IdentityProbe | None = None
        self._link: Link | None = None

    def open(self, settings: RendezvousSettings, join: Join) -> None:
        """Starts to connect; the agent hears of it through its callbacks."""
        if join.has_identity:
            self._probe = IdentityProbe(self._loop, self._spec.python, self._on_identity)
        self._link = open_link(
            self._loop,
            settings,
            join,
            lambda: JobHost(self._loop, Job(self._spec.job_rules())),
            self._on_message,
            self._agent.on_lost,
            self._console.say,
        )
        self._agent.connect(self._guard, self._link)

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, WantEnvironment):
            if self._probe is not None and self._probe.found is not None and self._link is not None:
                self._link.send(Environment(self._probe.found))
        else:
            self._agent.on_message(message)

    def _on_identity(self, identity: Identity) -> None:
        if self._link is not None:
            self._link.send(identity)
