"""The entry of a node into its job: it hosts the coordinator, or connects to it, and retries.

In: the endpoint and this node's Join. Out: a Link that can be used at once; messages wait until the coordinator is
reachable. Each round resolves the name, tries to host if that is allowed, then dials each address. So a
coordinator that starts later, moves, or is left over from an earlier job does no harm. A node that has joined and
loses its connection dials again and resumes its session (session.py); a node that was dropped rejoins.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, cast

import bootseer
from bootseer.errors import UsageError
from launcher.base.listen_address import is_ip
from launcher.base.loop import Cancellable, EventLoop
from launcher.coordinator.host import JobHost
from launcher.coordinator.hosted import HostedCoordinator
from launcher.rendezvous.clock import JobClock
from launcher.rendezvous.codec import MAX_NAME_CHARS
from launcher.rendezvous.connection import Callbacks, Connection, Ended, Timing
from launcher.rendezvous.coordinator_silence import PATIENCE, CoordinatorSilence
from launcher.rendezvous.endpoint import HostVerdict, Listener, find_own_address, is_loopback, try_to_host
from launcher.rendezvous.loopback_warning import LoopbackWarning
from launcher.rendezvous.messages import (
    DroppedFromJob,
    EventBatch,
    FromCoordinator,
    FromMember,
    Join,
    Leave,
    Refused,
    Resume,
    Resumed,
    Welcome,
)
from launcher.rendezvous.resolve import Address, NameQuery, address_literal, resolve
from launcher.rendezvous.retries import Retries
from launcher.rendezvous.session import MessageSession
from launcher.rendezvous.wire import Trouble

VERSION: str = getattr(bootseer, "__version__", "0")
TAKEN_PATIENCE_S = 2.0  # for a node that must host
_FINAL = (Trouble.VERSION, Trouble.SECRET)


class _Stage(Enum):
    JOINING = "joining"
    IN = "in"  # it has its Welcome
    CUT = "cut"  # it had, and tries to resume on another connection
    OUT = "out"  # the job has continued without it; it may rejoin
    AGAIN = "again"  # it is rejoining


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

    @property
    def place(self) -> str:
        """The endpoint, for users."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def max_silence_s(self) -> float:
        """The silence that heartbeats allow."""
        return self.keep_alive_interval_s * self.keep_alive_max_attempt

    def must_host(self, node_rank: int) -> bool | None:
        """Return whether the node must host, must not, or may if the endpoint is its own (None)."""
        if self.is_host is not None:
            return self.is_host
        return node_rank <= 0 if self.backend == "static" else None

    def timing(self, connect_s: float, max_nodes: int) -> Timing:
        """Return the times of a connection to the coordinator."""
        return Timing(
            connect_s=connect_s,
            ping_s=self.keep_alive_interval_s,
            silence_s=self.max_silence_s,
            first_ping_s=0.02 * max(1.0, max_nodes / 64),
        )


def open_link(
    loop: EventLoop,
    settings: RendezvousSettings,
    join: Join,
    make_host: Callable[[], JobHost],
    on_message: Callable[[FromCoordinator], object],
    on_lost: Callable[[str], object],
    say: Callable[[str], object],
) -> Member:
    """Start the rendezvous; `on_lost` is called at most once, with one line for users."""
    for name, text in (("--rdzv-id", join.run_id), ("--role", join.role), ("--local-addr", join.address)):
        if len(text) > MAX_NAME_CHARS:
            raise UsageError(f"{name} is longer than {MAX_NAME_CHARS} characters")
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
        self._session = MessageSession()  # before the Welcome: holds early messages
        self._clock = JobClock()
        self._token = ""
        self._broken = ""  # why the connection broke that is to be resumed
        self._heard_s = 0.0  # earliest time of the last message on it
        self._ships_events = False
        self._question: NameQuery | None = None
        self._connection: Connection | None = None
        self._hosted: HostedCoordinator | None = None
        self._timer: Cancellable | None = None
        is_static = settings.backend == "static"
        self._retries = Retries(is_static=is_static, max_silence_s=settings.max_silence_s)
        self._place = settings.place
        self._silence = CoordinatorSilence(self._place, settings.max_silence_s, settings.join_timeout_s, self._say)
        flag = "--master-addr" if is_static else "--rdzv-endpoint"
        self._loopback = LoopbackWarning(loop, self._place, flag, self._is_alone, say)
        self._is_foreign = False  # the endpoint is no known address of a node
        self._stage = _Stage.JOINING
        self._is_greeted = False  # the coordinator knows the node at the other end of this connection
        self._is_over = False
        self._leave_reason = ""
        self.own_ip = ""  # by which other nodes reach this one, if known; "" until it has joined

    # ---- Link ------------------------------------------------------------------------------------------------

    def send(self, message: FromMember) -> None:
        """See Link."""
        if isinstance(message, Leave):
            self._leave_reason = message.reason
        if self._hosted is not None:
            self._hosted.link.send(message)
            return
        if self._stage is _Stage.OUT:
            return  # no receiver
        self._session.sends(message)
        if self._connection is not None and self._is_at_work:
            self._connection.send(message)

    def rejoin(self, master_port: int) -> None:
        """See Link."""
        if self._is_over:
            return
        self._say("rejoining the job")
        self._join = self._join._replace(master_port=master_port)
        if self._connection is not None:
            self._connection.close()
        self._stage, self._token = _Stage.AGAIN, ""
        self._session = MessageSession()
        self._begin_rounds(self._settings.join_timeout_s)

    @property
    def _is_at_work(self) -> bool:
        """Whether messages arrive on the present connection."""
        return self._is_greeted and self._stage is not _Stage.OUT

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """See Link."""
        if self._hosted is not None:
            return self._hosted.link.to_job_clock(local_ns)
        return self._clock.map(local_ns) if self._connection is not None else (local_ns, 0)

    def close(self) -> None:
        """See Link; `is_closed` shows when it is done."""
        self._stop_trying()
        if self._hosted is not None:
            why = f": {self._leave_reason}" if self._leave_reason else ""
            self._hosted.close(f"{self._join.host}, the node of the coordinator, has left the job{why}")
        if self._connection is not None and not self._connection.is_last:
            self._connection.close()

    @property
    def is_local(self) -> bool:
        """See Link."""
        return self._hosted is not None

    @property
    def is_closed(self) -> bool:
        """After `close`: whether all messages are sent and the connections are closed."""
        return (self._hosted is None or self._hosted.is_closed) and (
            self._connection is None or self._connection.is_over
        )

    # ---- events ----------------------------------------------------------------------------------------------

    def begin_shipping(self) -> None:
        """Ship events over this link: after the end of the job, wait for `end_shipping`, within a limit."""
        self._ships_events = True
        if self._connection is not None:
            self._connection.ships_events = True

    @property
    def can_ship(self) -> bool:
        """Whether a batch of events would delay no urgent message."""
        if self._hosted is not None:
            return True
        return self._stage is _Stage.IN and self._connection is not None and self._connection.is_idle

    def ship(self, batch: EventBatch) -> None:
        """Send a batch; only if `can_ship`."""
        if self._hosted is not None:
            self._hosted.link.ship(batch)
        elif self._connection is not None:
            self._session.sends(batch)
            self._connection.send(batch)

    def end_shipping(self) -> None:
        """Note that the last events are sent."""
        if self._connection is not None:
            self._connection.end_last()

    # ---- one round -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the first round; called once, from the loop."""
        if self._is_over:
            return
        if self._settings.port == 0 and self._must_host() is False:
            self._fail(
                f"endpoint {self._settings.host}: no port is given, so this node cannot find its coordinator"
            )
            return
        self._begin_rounds(self._settings.join_timeout_s)

    def _begin_rounds(self, patience_s: float) -> None:
        self._retries.begin(patience_s, self._loop.time())
        self._round()

    def _round(self) -> None:
        self._timer = None
        self._retries.attempt_began(self._loop.time())
        self._question = resolve(self._loop, self._settings.host, self._on_resolved)

    def _on_resolved(self, addresses: list[Address], reason: str) -> None:
        self._question = None
        if self._is_over:
            return
        must_host = self._must_host()
        if not addresses:
            self._retries.remember(f"the host name cannot be resolved: {reason}")
            if not must_host:
                self._try_later()
                return
        if must_host is not False and self._try_to_host(addresses, must_host is True):
            return
        self._dial(addresses, 0)

    def _must_host(self) -> bool | None:
        """Return whether this node must host, must not, or may if the endpoint is its own (None)."""
        if self._stage is not _Stage.JOINING:
            return False  # another node hosts
        return self._settings.must_host(self._join.node_rank)

    def _try_later(self) -> None:
        self._connection = None
        pause_s = self._retries.next_pause_s((self._join.host, self._join.pid), self._loop.time())
        if pause_s is not None:
            self._timer = self._loop.call_later(pause_s, self._round)
        elif self._stage is not _Stage.JOINING:
            self._fail_again(self._retries.describe())
        else:
            foreign = "; it is not an address of this node: for a service's, give one node --rdzv-conf is_host=1"
            self._fail(
                f"no coordinator at {self._place} within {self._settings.join_timeout_s:g} s "
                f"(join_timeout): {self._retries.describe()}{foreign if self._is_foreign else ''}"
            )

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
        """Try to host. Return whether this round is over: this node hosts now, or has to wait or fail."""
        bound = try_to_host(self._settings.host, addresses, self._settings.port, must)
        self._is_foreign = bound.verdict is HostVerdict.NOT_OWN
        if bound.listener is not None:
            self._become_host(bound.listener, addresses)
            return True
        is_taken, now_s = bound.verdict is HostVerdict.TAKEN, self._loop.time()
        if not is_taken:
            self._retries.is_over(HostVerdict.TAKEN)
        lasts = is_taken and self._retries.lasts(HostVerdict.TAKEN, TAKEN_PATIENCE_S, now_s)
        if bound.verdict is HostVerdict.FAILED or (must and lasts):
            self._fail(f"this node cannot host the coordinator at {self._place}: {bound.reason}")
            return True
        if must and is_taken:
            self._try_later()
            return True
        return False

    def _become_host(self, listener: Listener, addresses: list[Address]) -> None:
        settings = self._settings
        self._hosted = HostedCoordinator(
            self._loop,
            self._make_host(),
            listener,
            settings.secret,
            VERSION,
            settings.max_silence_s,
            self._on_message,
            self._say,
        )
        if settings.port == 0:
            self._say(f"the endpoint of this job is {settings.host}:{listener.port}")
        own, is_certain = find_own_address(settings.host, addresses)
        self.own_ip = own if is_ip(own) else next((each.host for each in addresses), "")
        self._hosted.join(self._join, own, None if is_certain else self._on_reached)
        if is_loopback(own) or own == "localhost":
            self._warn_of_loopback()
        for message in self._session.begin():
            self._hosted.link.send(cast(FromMember, message))

    def _on_reached(self, address: str) -> None:
        self.own_ip = address

    def _warn_of_loopback(self) -> None:
        if self._join.max_nodes > 1:
            self._loopback.plan()

    def _is_alone(self) -> bool:
        has_others = self._hosted is not None and self._hosted.has_others
        return not (self._is_over or has_others or self._stage is not _Stage.JOINING)

    # ---- as a member -----------------------------------------------------------------------------------------

    def _dial(self, addresses: list[Address], index: int) -> None:
        if self._is_over:
            return
        self._retries.attempt_began(self._loop.time())
        settings, left_s = self._settings, self._retries.left_s(self._loop.time())
        connect_s = min(10.0 if len(addresses) == 1 else 3.0, max(0.1, left_s))
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
            settings.timing(connect_s, self._join.max_nodes),
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
        address = self._join.address or _reachable_address(self._settings.host, local_address)
        connection.send(self._join._replace(address=address))
        self._is_greeted = True
        for message in self._session.begin():
            connection.send(cast(FromMember, message))

    def _receive(self, message: FromCoordinator) -> None:
        if isinstance(message, Resumed):
            self._silence.ended()
            self._go_on(message.received)
            return
        if isinstance(message, Welcome):
            self._stage, self._token = _Stage.IN, message.token
        elif isinstance(message, DroppedFromJob):
            self._stage = _Stage.OUT
        elif isinstance(message, Refused):
            self._stop_trying()
        self._on_message(message)

    # ---- once it has joined ----------------------------------------------------------------------------------

    def _go_on(self, received: int) -> None:
        """Resume on a new connection, with the messages that did not arrive on the last one."""
        if self._connection is None:
            return
        self._stage, self._is_greeted = _Stage.IN, True
        self._session.heard(received)
        for message in self._session.missing():
            self._connection.send(cast(FromMember, message))

    def _on_silent(self, silence_s: float) -> None:
        """Handle silence: the coordinator or the network hangs; ranks need neither."""
        if not silence_s:
            self._silence.ended()
        connection = self._connection
        if not silence_s or connection is None or self._stage is not _Stage.IN:
            return
        is_there = connection.takes_all
        reason = self._silence.judge(silence_s, is_there=is_there)
        if reason:
            self._fail(reason)
        elif not is_there and self._settings.backend != "static":  # there rank 0 has the port
            self._heard_s = self._loop.time() - silence_s
            connection.close()
            self._dial_again(f"was silent for {silence_s:.0f} s")

    def _dial_again(self, broken: str) -> None:
        self._stage, self._broken = _Stage.CUT, broken
        self._begin_rounds(self._heard_s + PATIENCE * self._settings.max_silence_s - self._loop.time())

    def _fail_again(self, reason: str) -> None:
        """Fail, as this node could not return to the job."""
        what = f"it {self._broken}; then: {reason}" if self._stage is _Stage.CUT else reason
        self._fail(f"the coordinator at {self._place} is unreachable: {what}")

    def _on_ended_again(self, ended: Ended, addresses: list[Address], index: int) -> None:
        if self._stage is _Stage.OUT:
            return  # `rejoin` opens another one
        if self._stage is _Stage.IN:
            self._heard_s = self._loop.time()
            self._dial_again(ended.reason)
            return
        reason = f"the listening program {ended.reason}" if ended.trouble is not None else ended.reason
        self._retries.remember(reason)
        if ended.trouble in _FINAL or self._retries.is_gone(ended, self._loop.time()):
            broken = f"it {self._broken}" if self._stage is _Stage.CUT else "the job continued without this node"
            there = "nothing listens there any more" if ended.trouble is None else reason
            self._fail(f"the coordinator at {self._place} is gone: {broken}, and {there}")
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
        who = "the coordinator" if ended.trouble in _FINAL else "the listening program"
        reason = f"{who} {ended.reason}" if ended.trouble is not None else ended.reason
        if ended.trouble is None:
            self._retries.is_over(Trouble.CUT)
            self._retries.is_over(Trouble.FOREIGN)
        self._retries.remember(reason if len(addresses) == 1 else f"{addresses[index].host}: {reason}")
        if ended.trouble in _FINAL:
            self._fail(f"cannot join the job at {self._place}: {reason}")
        elif ended.trouble is not None and self._retries.is_hopeless(ended.trouble, self._loop.time()):
            self._fail(f"{self._place} is taken by another program: it {ended.reason}")
        elif index + 1 < len(addresses):
            self._dial(addresses, index + 1)
        else:
            if is_loopback(addresses[index].host) and address_literal(self._settings.host) is not None:
                self._warn_of_loopback()
            self._tell_trying(reason)
            self._try_later()

    def _tell_trying(self, reason: str) -> None:
        """Warn before the time is over that no coordinator is reachable."""
        now_s = self._loop.time()
        if self._retries.warns_now(now_s):
            left_s = max(0.0, self._retries.left_s(now_s))
            self._say(
                f"warning: no coordinator is reachable at {self._place} yet: {reason}; does the node that "
                f"hosts the job run, and is its port open? Retrying for {left_s:.0f} s"
            )


def _reachable_address(endpoint: str, local: str) -> str:
    """Return the address at which other nodes reach this one, from the local address of its connection."""
    if is_loopback(local) and address_literal(endpoint) is None:
        # Same host as the coordinator, and its name is a loopback address only here.
        return endpoint
    return local
