"""A job on several nodes: joins agent, link, coordinator and environment identity of this node.

Imported only when there is an endpoint; a job on one node never loads msgspec or opens a socket for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from launcher.agent import Agent
from launcher.guard_client import GuardClient
from launcher.image import LISTING
from launcher.job import Job
from launcher.loop import EventLoop
from launcher.ranks.console import Console
from launcher.ranks.program import RankProgram
from launcher.rendezvous.host import JobHost, Resolve
from launcher.rendezvous.identity import IdentityProbe
from launcher.rendezvous.member import Member, RendezvousSettings, open_link
from launcher.rendezvous.messages import Environment, FromCoordinator, Join, SetupOrder, WantEnvironment
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
        when_program_known: Callable[[Callable[[RankProgram], object]], object],
    ) -> None:
        """Args: when_program_known: calls back with what the ranks of this node are run by."""
        self._loop = loop
        self._spec = spec
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
        self._has_identity = join.has_identity
        self._when_program_known = when_program_known
        if join.has_identity:
            when_program_known(self._identify)
        agent.connect(guard, self._link)

    def _identify(self, program: RankProgram) -> None:
        """Finds out which Python environment ranks have here, and of which image."""
        environ = program.inherited(os.environ)
        is_program = self._spec.entry.mode == "program"
        self._probe = IdentityProbe(
            self._loop,
            "" if is_program else program.python,
            self._link.send,
            {name: value for name, value in environ.items() if name not in SECRET_VARIABLES},
            prefix=program.prefix,
            listing=LISTING if program.image else "",
            image=program.image,
        )

    def _on_message(self, message: FromCoordinator) -> None:
        if not isinstance(message, WantEnvironment):
            self._agent.on_message(message)
            if isinstance(message, SetupOrder) and message.do == "again" and self._has_identity:
                self._when_program_known(self._identify)  # when that is done
        elif self._probe is not None and self._probe.found is not None:
            self._link.send(Environment(self._probe.found))

    def close(self) -> None:
        """Ends what may still run of it."""
        if self._probe is not None:
            self._probe.close()
