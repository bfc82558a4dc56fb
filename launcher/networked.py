"""A job on several nodes: joins agent, link, coordinator and environment identity of this node.

Imported only when there is an endpoint; a job on one node never loads msgspec or opens a socket for it.
"""

from __future__ import annotations

import os

from launcher.agent import Agent
from launcher.guard_client import GuardClient
from launcher.job import Job
from launcher.loop import EventLoop
from launcher.ranks.console import Console
from launcher.rendezvous.host import JobHost, Resolve
from launcher.rendezvous.identity import IdentityProbe
from launcher.rendezvous.member import Member, RendezvousSettings, open_link
from launcher.rendezvous.messages import Environment, FromCoordinator, Join, WantEnvironment
from launcher.rendezvous.secret import SECRET_VARIABLES, find_secret
from launcher.spec import LaunchSpec


class Networked:
    """The way of one agent into its job; lives as long as the agent."""

    def __init__(
        self,
        loop: EventLoop,
        console: Console,
        spec: LaunchSpec,
        agent: Agent,
        guard: GuardClient,
        join: Join,
        resolve: Resolve | None,
    ) -> None:
        self._agent = agent
        secret = find_secret(os.environ, spec.conf.get("secret_file"))
        settings = RendezvousSettings(
            host=spec.endpoint[0],
            port=spec.endpoint[1],
            backend=spec.backend,
            is_host=spec.is_host,
            join_timeout_s=spec.join_timeout_s,
            keep_alive_interval_s=spec.keep_alive_interval_s,
            keep_alive_max_attempt=spec.keep_alive_max_attempt,
            secret=secret,
        )
        rules = spec.job_rules()._replace(open_membership=secret is None)
        self._link: Member = open_link(
            loop,
            settings,
            join,
            lambda: JobHost(loop, Job(rules), resolve=resolve),
            self._on_message,
            agent.on_lost,
            console.say,
        )
        self._probe: IdentityProbe | None = None
        if join.has_identity:
            environ = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
            self._probe = IdentityProbe(loop, spec.python, self._link.send, environ)
        agent.connect(guard, self._link)

    def _on_message(self, message: FromCoordinator) -> None:
        if not isinstance(message, WantEnvironment):
            self._agent.on_message(message)
        elif self._probe is not None and self._probe.found is not None:
            self._link.send(Environment(self._probe.found))

    def close(self) -> None:
        """Ends what may still run of it."""
        if self._probe is not None:
            self._probe.close()
