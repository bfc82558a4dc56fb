"""The way of a node into its job: finds out whether it hosts the coordinator, connects otherwise, tries again.

In: the endpoint and this node's Join. Out: a Link that can be used at once; what is sent before the coordinator is
there waits. Each round looks the name up, tries to host where that is allowed, then dials each address; so a
coordinator that comes up later, moves, or was the leftover of an earlier job does no harm. Who has joined, and
loses the connection, dials again and goes on where it was (session.py); who was given up joins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, cast

import bootseer
from bootseer.errors import UsageError
from launcher.loop import Cancellable, EventLoop
from launcher.rendezvous.clock import JobClock
from launcher.rendezvous.codec import MOST_NAME_CHARS
from launcher.rendezvous.connection import Callbacks, Connection, Ended, Timing
from launcher.rendezvous.coordinator import Coordinator, Limits
from launcher.rendezvous.endpoint import Listener, Verdict, find_own_address, is_loopback, try_to_host
from launcher.rendezvous.host import JobHost, LocalLink
from launcher.rendezvous.messages import (
    EventBatch,
    FromCoordinator,
    FromMember,
    GaveUp,
    Join,
    Leave,
    Refused,
    Resume,
    Resumed,
    Welcome,
)
from launcher.rendezvous.resolve import Address, Question, address_literal, resolve
from launcher.rendezvous.serving import is_ip
from launcher.rendezvous.session import Session
from launcher.rendezvous.wire import Trouble

VERSION: str = getattr(bootseer, "__version__", "0")
FIRST_PAUSE_S = 0.02
MOST_PAUSE_S = 0.5
# How long a program that is no coordinator may sit at the endpoint before that is the error.
FOREIGN_PATIENCE_S = 3.0
SILENT_PATIENCE_S = 60.0  # rank 0 of a static job has the port while ranks run
OWN_PORT_PATIENCE_S = 10.0  # ... but not of a job that finds its host by binding, on this node
TAKEN_PATIENCE_S = 2.0  # for a node that must host
TRYING_S = 3.0  # until it is told that nobody can be reached
ALONE_S = 1.0  # for another node on this host to come, where the endpoint is a loopback address
# Of a node that had joined: where nobody listens any more the coordinator has ended.
GONE_PATIENCE_S = 1.0
# So many times the silence that heartbeats allow, a coordinator is tried that cannot be reached.
PATIENCE = 4
_FINAL = (Trouble.VERSION, Trouble.SECRET)
_NOBODY = "connection refused"


class _Stage(Enum):
    JOINING = "joining"
    IN = "in"  # it has its Welcome
    CUT = "cut"  # it had, and tries to go on with another connection
    OUT = "out"  # the job has gone on without it; it may join anew
    AGAIN = "again"  # it does


class RendezvousSettings(NamedTuple):
    """The endpoint and the times of the rendezvous (--rdzv-endpoint, --rdzv-backend, --rdzv-conf)."""

    host: str
    port: int
    backend: str = "c10d"
    is_host: bool | None = None
    join_timeout_s: float = 600.0
    keep_alive_interval_s: float = 5.0
    keep_alive_max_attempt: int = 3
    secret: bytes | None = None


def open_link(
    loop: EventLoop,
    settings: RendezvousSettings,
    join: Join,
    make_host: Callable[[], JobHost],
    on_message: Callable[[FromCoordinator], object],
    on_lost: Callable[[str], object],
    say: Callable[[str], object],
) -> Member:
    """Starts the rendezvous; `on_lost` is called at most once, with one line for people."""
    for name, text in (("--rdzv-id", join.run_id), ("--role", join.role), ("--local-addr", join.address)):
        if len(text) > MOST_NAME_CHARS:
            raise UsageError(f"{name} is longer than {MOST_NAME_CHARS} characters")
    member = Member(loop, settings, join, make_host, on_message, on_lost, say)
    loop.call_soon(member.start)
    return member


class Member:
    """The Link of a node of a job of several nodes."""

    def __init__(
        self,
        loop: EventLoop,
        settings: RendezvousSettings,
        join: Join,
        make_host: Callable[[], JobHost],
        on_message: Callable[[FromCoordinator], object],
        on_lost: Callable[[str], object],
        say: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._join = join
        self._make_host = make_host
        self._on_message = on_message
        self._on_lost = on_lost
        self._say = say
        self._session = Session()  # before the Welcome: what was sent early
        self._clock = JobClock()
        self._token = ""
        self._broken = ""  # why the connection broke that is to be gone on with
        self._heard_s = 0.0  # when that was heard of last, at the earliest
        self._is_silence_told = False
        self._ships_events = False
        self._question: Question | None = None
        self._connection: Connection | None = None
        self._local: LocalLink | None = None
        self._coordinator: Coordinator | None = None
        self._timer: Cancellable | None = None
        self._give_up_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._reasons: list[str] = []  # why attempts failed, the last ones last
        self._is_alone_planned = False
        self._trying_since_s: float | None = None  # and not told of yet; infinite once it was
        self._is_foreign = False  # the endpoint is not known to be any node's
        self._since_s: dict[Trouble | Verdict, float] = {}  # first time of each obstacle
        self._attempt_s = 0.0  # when the present one began
        self._stage = _Stage.JOINING
        self._is_greeted = False  # the coordinator knows who is at the other end of this connection
        self._gone_since_s: float | None = None  # nobody listens at the endpoint
        self._is_over = False
        self._leave_reason = ""
        self.own_ip = ""  # by which other nodes reach this one, as far as it is known; "" until it has joined

    # ---- Link ------------------------------------------------------------------------------------------------

    def send(self, message: FromMember) -> None:
        """See Link."""
        if isinstance(message, Leave):
            self._leave_reason = message.reason
        if self._local is not None:
            self._local.send(message)
            return
        if self._stage is _Stage.OUT:
            return  # nobody wants to know
        self._session.sends(message)
        if self._connection is not None and self._is_at_work:
            self._connection.send(message)

    def rejoin(self, master_port: int) -> None:
        """See Link."""
        if self._is_over:
            return
        self._say("this node joins the job again")
        self._join = self._join._replace(master_port=master_port)
        if self._connection is not None:
            self._connection.close()
        self._stage, self._token = _Stage.AGAIN, ""
        self._session = Session()
        self._begin_rounds(self._settings.join_timeout_s)

    @property
    def _is_at_work(self) -> bool:
        """Whether what is sent arrives on the connection that there is."""
        return self._is_greeted and self._stage is not _Stage.OUT

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """See Link."""
        if self._local is not None:
            return self._local.to_job_clock(local_ns)
        return self._clock.map(local_ns) if self._connection is not None else (local_ns, 0)

    def close(self) -> None:
        """See Link; `is_closed` tells when it is done."""
        self._stop_trying()
        if self._coordinator is not None:
            why = f": {self._leave_reason}" if self._leave_reason else ""
            self._coordinator.close(f"{self._join.host}, the node of the coordinator, has left the job{why}")
        if self._local is not None:
            self._local.close()
        if self._connection is not None and not self._connection.is_last:
            self._connection.close()

    @property
    def is_local(self) -> bool:
        """See Link."""
        return self._local is not None

    @property
    def is_closed(self) -> bool:
        """After `close`: whether all that was to be sent is sent and the connections are closed."""
        return (self._coordinator is None or self._coordinator.is_closed) and (
            self._connection is None or self._connection.is_over
        )

    # ---- events ----------------------------------------------------------------------------------------------

    def begin_shipping(self) -> None:
        """Events go this way: after the end of the job `end_shipping` is waited for, within a bound."""
        self._ships_events = True
        if self._connection is not None:
            self._connection.ships_events = True

    @property
    def can_ship(self) -> bool:
        """Whether nothing urgent would have to wait for a batch of events."""
        if self._local is not None:
            return True
        return self._stage is _Stage.IN and self._connection is not None and self._connection.is_idle

    def ship(self, batch: EventBatch) -> None:
        """Sends it, if `can_ship`."""
        if self._local is not None:
            self._local.ship(batch)
        elif self._connection is not None:
            self._session.sends(batch)
            self._connection.send(batch)

    def end_shipping(self) -> None:
        """The last events are sent."""
        if self._connection is not None:
            self._connection.end_last()

    # ---- one round -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called once, from the loop."""
        if self._is_over:
            return
        if self._settings.port == 0 and self._must_host() is False:
            self._fail(
                f"the endpoint {self._settings.host} needs a port, or this node cannot find its coordinator"
            )
            return
        self._begin_rounds(self._settings.join_timeout_s)

    def _begin_rounds(self, patience_s: float) -> None:
        self._give_up_s = self._loop.time() + patience_s
        self._pause_s = FIRST_PAUSE_S
        self._reasons.clear()
        self._since_s.clear()
        self._gone_since_s = None
        self._round()

    def _round(self) -> None:
        self._timer = None
        self._attempt_s = self._loop.time()
        self._question = resolve(self._loop, self._settings.host, self._on_resolved)

    def _on_resolved(self, addresses: list[Address], reason: str) -> None:
        self._question = None
        if self._is_over:
            return
        must_host = self._must_host()
        if not addresses:
            self._remember(f"the host name cannot be resolved: {reason}")
            if not must_host:
                self._try_later()
                return
        if must_host is not False and self._try_to_host(addresses, must_host is True):
            return
        self._dial(addresses, 0)

    def _must_host(self) -> bool | None:
        """Whether this node must host, must not, or may if the endpoint is its own (None)."""
        if self._stage is not _Stage.JOINING:
            return False  # it is another node's job
        if self._settings.is_host is not None:
            return self._settings.is_host
        if self._settings.backend == "static":
            return self._join.node_rank <= 0
        return None

    def _remember(self, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.remove(reason)
        self._reasons.append(reason)
        del self._reasons[:-3]

    def _lasts(self, obstacle: Trouble | Verdict, patience_s: float) -> bool:
        """Whether this obstacle has been met for longer than that, the time of the attempt included."""
        return self._loop.time() - self._since_s.setdefault(obstacle, self._attempt_s) >= patience_s

    def _try_later(self) -> None:
        self._connection = None
        if self._loop.time() + self._pause_s >= self._give_up_s:
            if self._stage is not _Stage.JOINING:
                self._fail_again("; ".join(self._reasons))
                return
            foreign = "; it is no address of this node: if it is a service's, one node needs --rdzv-conf is_host=1"
            self._fail(
                f"no coordinator at {self._place()} within {self._settings.join_timeout_s:g} s (join_timeout): "
                + "; ".join(self._reasons)
                + (foreign if self._is_foreign else "")
            )
            return
        # Nodes that were started together do not come back together.
        jitter = 0.5 + (hash((self._join.host, self._join.pid, self._pause_s)) % 1000) / 1000
        self._timer = self._loop.call_later(self._pause_s * jitter, self._round)
        self._pause_s = min(MOST_PAUSE_S, self._pause_s * 2)

    def _place(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{host}:{self._settings.port}"

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self._stop_trying()
            if self._connection is not None:
                self._connection.close()
            self._on_lost(reason)

    def _stop_trying(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._question is not None:
            self._question.cancel()
            self._question = None

    # ---- as the host -----------------------------------------------------------------------------------------

    def _try_to_host(self, addresses: list[Address], must: bool) -> bool:
        """Whether this round is over: this node hosts now, or has to wait or give up."""
        bound = try_to_host(self._settings.host, addresses, self._settings.port, must)
        self._is_foreign = bound.verdict is Verdict.NOT_OURS
        if bound.listener is not None:
            self._become_host(bound.listener, addresses)
            return True
        if bound.verdict is Verdict.FAILED or (
            must and bound.verdict is Verdict.TAKEN and self._lasts(Verdict.TAKEN, TAKEN_PATIENCE_S)
        ):
            self._fail(f"this node cannot host the coordinator at {self._place()}: {bound.reason}")
            return True
        if bound.verdict is Verdict.TAKEN:
            if must:
                self._try_later()
                return True
            self._lasts(Verdict.TAKEN, 0)
        else:
            self._since_s.pop(Verdict.TAKEN, None)
        return False

    def _become_host(self, listener: Listener, addresses: list[Address]) -> None:
        settings = self._settings
        host = self._make_host()
        silence_s = settings.keep_alive_interval_s * settings.keep_alive_max_attempt
        self._coordinator = Coordinator(
            self._loop, host, listener, settings.secret, VERSION, self._say, Limits(heartbeat_s=silence_s)
        )
        if settings.port == 0:
            self._say(f"the endpoint of this job is {settings.host}:{listener.port}")
        self._local = LocalLink(self._loop, host, self._on_message)
        own, is_certain = find_own_address(settings.host, addresses)
        self.own_ip = own if is_ip(own) else next((each.host for each in addresses), "")
        self._local.send(self._join._replace(address=self._join.address or own))
        if not is_certain:
            self._coordinator.on_reached = self._on_reached
        if is_loopback(own) or own == "localhost":
            self._plan_alone()
        for message in self._session.begin():
            self._local.send(cast(FromMember, message))

    def _on_reached(self, address: str) -> None:
        self.own_ip = address
        if self._local is not None and not self._join.address:
            self._local.reached(address)

    def _plan_alone(self) -> None:
        if not self._is_alone_planned and self._join.max_nodes > 1:
            self._is_alone_planned = True
            self._loop.call_later(ALONE_S, self._say_alone)

    def _say_alone(self) -> None:
        """The endpoint is a loopback address: nodes on other hosts each take themselves for its host."""
        has_others = self._coordinator is not None and self._coordinator.has_members
        if self._is_over or has_others or self._stage is not _Stage.JOINING:
            return
        flag = "--master-addr" if self._settings.backend == "static" else "--rdzv-endpoint"
        self._say(
            f"warning: the endpoint {self._place()} is this host alone, and no other node has come: nodes on "
            f"other hosts cannot reach it; give all nodes the name or address of one host by {flag}"
        )

    # ---- as a member -----------------------------------------------------------------------------------------

    def _dial(self, addresses: list[Address], index: int) -> None:
        if self._is_over:
            return
        self._attempt_s = self._loop.time()
        settings = self._settings
        timing = Timing(
            connect_s=min(10.0 if len(addresses) == 1 else 3.0, max(0.1, self._give_up_s - self._loop.time())),
            ping_s=settings.keep_alive_interval_s,
            silence_s=settings.keep_alive_interval_s * settings.keep_alive_max_attempt,
            first_ping_s=0.02 * max(1.0, self._join.max_nodes / 64),
        )
        self._connection = Connection(
            self._loop,
            addresses[index],
            settings.port,
            settings.secret,
            VERSION,
            Callbacks(
                self._on_open,
                self._receive,
                lambda ended: self._on_ended(ended, addresses, index),
                self._on_silent,
            ),
            timing,
            session=self._session,
            clock=self._clock,
        )
        self._is_greeted = False
        self._connection.ships_events = self._ships_events

    def _on_open(self, local_address: str) -> None:
        connection = self._connection
        if connection is None:
            return
        self.own_ip = local_address
        if self._stage is _Stage.CUT:
            connection.send(Resume(self._token, self._session.received))
            return
        address = self._join.address or local_address
        if is_loopback(address) and not self._join.address and address_literal(self._settings.host) is None:
            # Same host as the coordinator, by a name that is a loopback address only here.
            address = self._settings.host
        connection.send(self._join._replace(address=address))
        self._is_greeted = True
        for message in self._session.begin():
            connection.send(cast(FromMember, message))

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Resumed):
            self._hear_again()
            self._go_on(message.received)
            return
        if isinstance(message, Welcome):
            self._stage, self._token = _Stage.IN, message.token
        elif isinstance(message, GaveUp):
            self._stage = _Stage.OUT
        elif isinstance(message, Refused):
            self._stop_trying()
        self._on_message(message)

    # ---- once it has joined ----------------------------------------------------------------------------------

    def _go_on(self, received: int) -> None:
        """On a new connection, with what had not arrived on the last one."""
        if self._connection is None:
            return
        self._stage, self._is_greeted = _Stage.IN, True
        self._session.heard(received)
        for message in self._session.missing():
            self._connection.send(cast(FromMember, message))

    def _on_silent(self, silence_s: float) -> None:
        """The coordinator, or the way to it, stands still; ranks need neither."""
        connection, limit_s = self._connection, self._most_silence_s
        if not silence_s:
            self._hear_again()
        if not silence_s or connection is None or self._stage is not _Stage.IN:
            return
        is_there = connection.takes_all
        if not self._is_silence_told:
            self._is_silence_told = True
            where = "although its machine answers" if is_there else "nor does its machine answer"
            self._say(
                f"warning: nothing is heard of the coordinator at {self._place()} for {silence_s:.0f} s, {where}; "
                "the ranks of this node go on"
            )
        if is_there:
            if silence_s >= max(PATIENCE * limit_s, self._settings.join_timeout_s):
                self._fail(f"nothing was heard of the coordinator at {self._place()} for {silence_s:.0f} s")
        elif silence_s >= PATIENCE * limit_s:
            self._fail(f"the coordinator at {self._place()} was out of reach for {silence_s:.0f} s")
        elif self._settings.backend != "static":  # there rank 0 has the port: no other connection can be had
            self._heard_s = self._loop.time() - silence_s
            connection.close()
            self._dial_again(f"was silent for {silence_s:.0f} s")

    def _hear_again(self) -> None:
        if self._is_silence_told:
            self._is_silence_told = False
            self._say("the coordinator is heard of again")

    @property
    def _most_silence_s(self) -> float:
        return self._settings.keep_alive_interval_s * self._settings.keep_alive_max_attempt

    def _dial_again(self, broken: str) -> None:
        self._stage, self._broken = _Stage.CUT, broken
        self._begin_rounds(self._heard_s + PATIENCE * self._most_silence_s - self._loop.time())

    def _fail_again(self, reason: str) -> None:
        """The way back into the job was not found."""
        what = f"it {self._broken}; then: {reason}" if self._stage is _Stage.CUT else reason
        self._fail(f"the coordinator at {self._place()} is out of reach: {what}")

    def _is_gone(self, ended: Ended) -> bool:
        """Whether a connection that cannot be made again shows that the coordinator has ended."""
        is_foreign = ended.trouble is not None
        if not is_foreign and ended.reason != _NOBODY:
            self._gone_since_s = None
            return False
        if self._gone_since_s is None:
            self._gone_since_s = self._loop.time()
        # While ranks of a static job run, it does not listen; rank 0 does, at the same port.
        patience_s = self._most_silence_s if self._settings.backend == "static" else GONE_PATIENCE_S
        return self._loop.time() - self._gone_since_s >= patience_s

    def _on_ended_again(self, ended: Ended, addresses: list[Address], index: int) -> None:
        if self._stage is _Stage.OUT:
            return  # `rejoin` makes another one
        if self._stage is _Stage.IN:
            self._heard_s = self._loop.time()
            self._dial_again(ended.reason)
            return
        reason = f"what listens there {ended.reason}" if ended.trouble is not None else ended.reason
        self._remember(reason)
        if ended.trouble in _FINAL or self._is_gone(ended):
            broken = f"it {self._broken}" if self._stage is _Stage.CUT else "the job went on without this node"
            there = "nobody listens there" if ended.trouble is None else reason
            self._fail(f"the coordinator at {self._place()} is gone: {broken}, and {there} any more")
        elif index + 1 < len(addresses):
            self._dial(addresses, index + 1)
        else:
            self._try_later()

    def _on_ended(self, ended: Ended, addresses: list[Address], index: int) -> None:
        if self._is_over:
            return
        if self._stage is not _Stage.JOINING:
            self._on_ended_again(ended, addresses, index)
            return
        who = "the coordinator" if ended.trouble in _FINAL else "what listens there"
        reason = f"{who} {ended.reason}" if ended.trouble is not None else ended.reason
        if ended.trouble is None:
            self._since_s.pop(Trouble.CUT, None)
            self._since_s.pop(Trouble.FOREIGN, None)
        self._remember(reason if len(addresses) == 1 else f"{addresses[index].host}: {reason}")
        if ended.trouble in _FINAL:
            self._fail(f"cannot join the job at {self._place()}: {reason}")
        elif ended.trouble is not None and self._is_hopeless(ended.trouble):
            self._fail(f"{self._place()} is taken by another program: it {ended.reason}")
        elif index + 1 < len(addresses):
            self._dial(addresses, index + 1)
        else:
            if is_loopback(addresses[index].host) and address_literal(self._settings.host) is not None:
                self._plan_alone()
            self._tell_trying(reason)
            self._try_later()

    def _tell_trying(self, reason: str) -> None:
        """Nobody is there yet, or never will be: people want to know before the time is over."""
        now_s = self._loop.time()
        if self._trying_since_s is None:
            self._trying_since_s = now_s
        if now_s - self._trying_since_s >= TRYING_S:
            self._trying_since_s = math.inf
            self._say(
                f"warning: nobody can be reached at {self._place()} yet: {reason}; has the node that hosts the "
                f"job been started, and is its port open? Trying {max(0.0, self._give_up_s - now_s):.0f} s more"
            )

    def _is_hopeless(self, trouble: Trouble) -> bool:
        if trouble is Trouble.FOREIGN:
            return self._lasts(trouble, FOREIGN_PATIENCE_S)
        is_own = Verdict.TAKEN in self._since_s and self._settings.backend != "static"
        return self._lasts(trouble, OWN_PORT_PATIENCE_S if is_own else SILENT_PATIENCE_S)
