"""A job on several nodes: connects agent, link, coordinator and environment identity of this node.

Imported only when there is an endpoint: a job on one node never loads msgspec or opens a socket for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bootseer.secret import SECRET_VARIABLES
from launcher.agent.agent import Agent
from launcher.agent.member import Member, RendezvousSettings, open_link
from launcher.base.listen_address import is_ip
from launcher.base.loop import Cancellable, EventLoop
from launcher.coordinator.host import JobHost
from launcher.coordinator.job import Job
from launcher.provision.image import LISTING
from launcher.ranks.output.console import Console
from launcher.ranks.program import RankProgram
from launcher.ranks.rank0_ready import ReadinessWait
from launcher.rendezvous.identity import IdentityProbe
from launcher.rendezvous.messages import (
    ClockReading,
    Environment,
    Finish,
    FromCoordinator,
    FromMember,
    Identity,
    Join,
    Leave,
    Listens,
    MasterListens,
    PairOrder,
    PeerNodes,
    PeerServes,
    SetupOrder,
    Stopped,
    Succeeded,
    WantEnvironment,
    WantEvents,
    WantPairs,
    Welcome,
    World,
)
from launcher.spec import LaunchSpec
from launcher.supervisor.client import SupervisorClient

if TYPE_CHECKING:
    from launcher.agent.event_files import EventFile
    from launcher.agent.event_shipping import Shipper
    from launcher.base.facts import RankFacts
    from launcher.coordinator.host import Resolve, Spoiled
    from launcher.coordinator.run_events import RunEvents
    from launcher.health.network_pairs import NodeNetworkTest
    from launcher.provision.peers import NodePeers


CLOCK_AFTER_S, CLOCK_EVERY_S = 3.0, 60.0  # by then the clock comparison is accurate
MAX_CLOCK_ERROR_NS = 10**9  # with a larger error a comparison is useless


class Networked:
    """The connection of one agent to its job; lives as long as the agent."""

    def __init__(
        self,
        loop: EventLoop,
        console: Console,
        spec: LaunchSpec,
        agent: Agent,
        guard: SupervisorClient,
        join: Join,
        resolve: Resolve | None,
        spoiled: Spoiled | None,
        when_program_known: Callable[[Callable[[RankProgram], object]], object],
        look_again: Callable[[], object],
        events: EventFile | None,
        peers: NodePeers | None,
        secret: bytes | None,
    ) -> None:
        """Args: when_program_known: calls back with the program that runs this node's ranks; look_again: searches
        for their environment again if it is missing; events: the event file of this node's bootrun, None if no
        events are written; peers: None if peer sharing is disabled."""
        self._loop = loop
        self._console = console
        self._spec = spec
        self._agent = agent
        self._join = join
        self._events = events
        self._peers = peers
        self._shipper: Shipper | None = None  # once the coordinator wants events
        self._run_events: RunEvents | None = None  # only at the coordinator
        self._job: Job | None = None  # at the coordinator
        self._secret = secret
        self._pairs: NodeNetworkTest | None = None  # from the first network test on
        self._clock_timer: Cancellable | None = None  # with --check, once there are ranks
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
        self._rules = spec.job_rules()._replace(open_membership=secret is None)
        self._resolve, self._spoiled = resolve, spoiled
        self._link: Member = open_link(
            loop,
            settings,
            join,
            self._make_host,
            self._on_message,
            agent.on_lost,
            console.say,
        )
        self.head_start = ReadinessWait(loop, lambda attempt: self._link.send(Listens(attempt)))
        self._probe: IdentityProbe | None = None
        self._identity: Identity | None = None  # the latest result
        self._has_identity = join.has_identity
        self._when_program_known = when_program_known
        self._look_again = look_again
        if join.has_identity:
            when_program_known(self._identify)
        agent.connect(guard, _AgentLink(self._link, lambda: self._shipper, self._on_rejoin))

    def _make_host(self) -> JobHost:
        """Make the coordinator, which this node hosts."""
        if self._events is not None:
            from bootseer.events import run_events_path
            from launcher.coordinator.run_events import RunEvents
            from launcher.coordinator.run_file import RunFile

            path = run_events_path(os.path.dirname(self._events.path))
            self._run_events = RunEvents(RunFile(path, self._rules.run_id))
        self._job = Job(self._rules)
        return JobHost(
            self._loop, self._job, resolve=self._resolve, events=self._run_events, spoiled=self._spoiled
        )

    def statistics(self) -> dict[str, int | str]:
        """Return the job's statistics at the coordinator, {} elsewhere."""
        return {} if self._job is None else self._job.statistics()

    def newest_facts(self) -> list[tuple[str, RankFacts]]:
        """Return the newest facts of the job's ranks at the coordinator, [] elsewhere."""
        return [] if self._job is None else self._job.newest_facts()

    def _identify(self, program: RankProgram) -> None:
        """Determine the Python environment and the image of this node's ranks."""
        environ = program.inherited(os.environ)
        is_program = self._spec.entry.mode == "program"
        self._probe = IdentityProbe(
            self._loop,
            "" if is_program else program.python,
            self._on_identity,
            {name: value for name, value in environ.items() if name not in SECRET_VARIABLES},
            prefix=program.prefix,
            listing=LISTING if program.image else "",
            image=program.image,
        )

    def _on_identity(self, identity: Identity) -> None:
        self._identity = identity
        self._link.send(identity)

    def _on_rejoin(self) -> None:
        """Send what the coordinator needs from a new node besides its Join."""
        if self._identity is not None:
            self._link.send(self._identity)
        self._look_again()

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, WantEvents):
            self._begin_shipping()
        elif isinstance(message, MasterListens):
            self.head_start.heard(message.attempt)
        elif isinstance(message, PeerNodes):
            if self._peers is not None:
                self._peers.meet(message)
        elif isinstance(message, WantPairs):
            self._listen_for_pairs(message)
        elif isinstance(message, PairOrder):
            if self._pairs is not None:
                self._pairs.measure(message)
        elif not isinstance(message, WantEnvironment):
            if isinstance(message, World):
                self._ship_attempt(message)
                if self._pairs is not None:
                    self._pairs.close()
                if self._clock_timer is None and self._spec.check != "off":
                    self._clock_timer = self._loop.call_later(CLOCK_AFTER_S, self._send_clock)
            elif isinstance(message, Welcome) and self._peers is not None:
                self._peers.connect(self._send_peer_port)
            self._agent.on_message(message)
            if isinstance(message, Finish) and self._shipper is not None:
                self._shipper.finish()
            if isinstance(message, SetupOrder) and message.do == "again" and self._has_identity:
                self._when_program_known(self._identify)  # when that is done
        elif self._probe is not None and self._probe.found is not None:
            self._link.send(Environment(self._probe.found))

    def _listen_for_pairs(self, message: WantPairs) -> None:
        if self._pairs is None:
            from launcher.health.network_pairs import NodeNetworkTest

            given = self._spec.local_addr if is_ip(self._spec.local_addr) else ""
            self._pairs = NodeNetworkTest(
                self._loop,
                self._rules.run_id,
                self._secret,
                SECRET_VARIABLES,
                given,
                self._spec.port_range,
                lambda: given or self._link.own_ip,
                self._link.send,
            )
        self._pairs.begin(message)

    def _send_clock(self) -> None:
        """Send this node's wall-clock time to the coordinator, which compares clocks."""
        self._clock_timer = self._loop.call_later(CLOCK_EVERY_S, self._send_clock)
        job_ns, error_ns = self._link.to_job_clock(time.monotonic_ns())
        if error_ns < MAX_CLOCK_ERROR_NS:
            self._link.send(ClockReading(time.time_ns(), job_ns, error_ns))

    def _send_peer_port(self, port: int) -> None:
        given = self._spec.local_addr
        self._link.send(PeerServes(self._join.host, given if is_ip(given) else self._link.own_ip, port))

    def _begin_shipping(self) -> None:
        if self._events is not None and self._shipper is None:
            from launcher.agent.event_shipping import Shipper

            self._shipper = Shipper(self._loop, self._link, self._events, self._join.max_nodes)
            self._link.begin_shipping()

    def _ship_attempt(self, world: World) -> None:
        """Follow the event files of an attempt, before its ranks start: present content is from another run."""
        if self._shipper is not None and self._events is not None:
            from bootseer.events import rank_events_path

            directory, host = os.path.dirname(self._events.path), self._join.host
            ranks = range(world.first_rank, world.first_rank + self._spec.nproc)
            paths = [rank_events_path(directory, host, rank, world.attempt) for rank in ranks]
            self._shipper.follow(paths, world.group_world_size)

    def close(self) -> None:
        """End all parts that still run. The last events get a moment to reach the disk."""
        if self._shipper is not None:
            self._shipper.close()
        if self._run_events is not None and (line := self._run_events.close()):
            self._console.say(line)
        if self._probe is not None:
            self._probe.close()
        if self._pairs is not None:
            self._pairs.close()
        if self._clock_timer is not None:
            self._clock_timer.cancel()


class _AgentLink:
    """The link that the agent uses: it sends events before the node leaves, and soon after an attempt."""

    def __init__(
        self, link: Member, shipper: Callable[[], Shipper | None], rejoined: Callable[[], object]
    ) -> None:
        self._link = link
        self._shipper = shipper
        self._rejoined = rejoined

    def send(self, message: FromMember) -> None:
        shipper = self._shipper()
        if shipper is not None and isinstance(message, Leave):
            shipper.flush()
        self._link.send(message)
        if shipper is not None and isinstance(message, Succeeded | Stopped):
            shipper.hurry()  # not before: the job waits for this message

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        return self._link.to_job_clock(local_ns)

    def rejoin(self, master_port: int) -> None:
        self._link.rejoin(master_port)
        self._rejoined()

    @property
    def is_local(self) -> bool:
        return self._link.is_local

    @property
    def is_closed(self) -> bool:
        return self._link.is_closed

    def close(self) -> None:
        shipper = self._shipper()
        if shipper is not None:
            shipper.end()
        self._link.close()
