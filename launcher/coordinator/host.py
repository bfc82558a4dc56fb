"""The shell around the Job: it passes messages, lost nodes and the time to it, and carries out its orders.

A job on one node uses it alone, through a LocalLink; with several nodes server.py attaches TCP connections.
"""

from __future__ import annotations

from bootseer.light_stdlib import deque
from bootseer.light_typing import TYPE_CHECKING, Callable, Protocol
from launcher.base.loop import Cancellable, EventLoop
from launcher.coordinator.job import Job
from launcher.coordinator.nodes import Silence
from launcher.coordinator.orders import Listen, Order, Send
from launcher.rendezvous import messages

if TYPE_CHECKING:
    from launcher.rendezvous.serving import ServingNodes

    Deliver = Callable[[messages.FromCoordinator], object]
    # Receives unavailable versions, and failures of ranks; the reaction follows in the next `Resolve`.
    Spoiled = Callable[[messages.CheckpointFailed | messages.RankFailed], object]
    # Finds the checkpoint version for an attempt and calls back with it (None: it cannot be pinned), or with the
    # reason why the job cannot continue.
    Resolve = Callable[[Callable[[messages.Pinned | None, str], object]], object]


class Events(Protocol):
    """The receiver of the events of all nodes (run_events.py); never blocks."""

    def joined(self, node: int, host: str) -> None: ...
    def left(self, node: int) -> None: ...
    def receive(self, node: int, batch: messages.EventBatch) -> None: ...


class JobHost:
    """The owner of the Job of this coordinator.

    With a checkpoint to load, an attempt's Worlds wait until its version is known: once for the job, so that no
    two nodes load different versions. Nothing else waits. A node that has to stop before it got its World has
    nothing to stop, so the host answers for it, and a signal ends the job however long the store is silent.
    """

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        resolve: Resolve | None = None,
        events: Events | None = None,
        spoiled: Spoiled | None = None,
    ) -> None:
        self._loop = loop
        self.job = job
        self.on_listen: Callable[[bool], object] | None = None
        self.on_finish: Callable[[messages.Finish], object] | None = None
        self._resolve = resolve
        self._spoiled = spoiled
        self._events = events
        self._serving: ServingNodes | None = None  # once a node serves
        self._held: dict[int, messages.World] = {}  # by node: Worlds that wait for the version
        self._is_resolving = False
        self._deliver: dict[int, Deliver] = {}
        self._leads: tuple[int, int] | None = None  # the node with rank 0, and its attempt
        self._next_node = 0
        self._timer: Cancellable | None = None
        self._timer_at_s: float | None = None

    @property
    def wants_events(self) -> bool:
        """Whether nodes may send the lines of their event files."""
        return self._events is not None

    def attach(self, deliver: Deliver) -> int:
        """Add a node; `deliver` is called with each message to it, never from within this call."""
        number = self._next_node
        self._next_node += 1
        self._deliver[number] = deliver
        return number

    def receive(self, node: int, message: messages.FromMember) -> None:
        """Take a message of an attached node; events also after its Finish."""
        is_here = node in self._deliver
        match message:  # the frequent ones first: a class that a case names is made when the case is reached
            case messages.Started() | messages.Succeeded():
                self._pass_on(node, message)
            case messages.Join(host=host):
                if is_here and self._events is not None:
                    self._events.joined(node, host)
                self._pass_on(node, message)
            case messages.RankFailed():
                if is_here and self._spoiled is not None:
                    self._spoiled(message)
                self._pass_on(node, message)
            case messages.EventBatch():
                if self._events is not None:
                    self._events.receive(node, message)
            case messages.PeerServes():
                if is_here:
                    self._serves(node, message)
            case messages.Listens(attempt):
                if is_here and (node, attempt) == self._leads:
                    self._tell_others(node, messages.MasterListens(attempt))
            case messages.CheckpointFailed():
                if is_here and self._spoiled is not None:
                    self._spoiled(message)
                    self._carry_out(self.job.start_again(message.attempt, message.text, self._loop.time()))
            case messages.Leave():
                if is_here:
                    self._held.pop(node, None)
                self._pass_on(node, message)
            case _:
                self._pass_on(node, message)

    def _pass_on(self, node: int, message: messages.FromMember) -> None:
        if node in self._deliver:
            self._carry_out(self.job.receive(node, message, self._loop.time()))

    def lost(self, node: int, reason: str, heard_s: float | None = None) -> None:
        """Remove a lost node; its last message came at `heard_s` of the loop's time."""
        if self._deliver.pop(node, None) is not None:
            self._forget(node)
            self._held.pop(node, None)
            self._carry_out(self.job.lost(node, reason, self._loop.time(), heard_s))

    def reached(self, node: int, address: str) -> None:
        """Note that other nodes have reached this node's machine at that address."""
        self.job.reached(node, address)

    def unheard(self, node: int, how: Silence, reason: str, heard_s: float, limit_s: float) -> None:
        """Note that a node is silent since `heard_s`; it may come back, or gets a DroppedFromJob. See Job."""
        if node in self._deliver:
            self._carry_out(self.job.unheard(node, how, reason, self._loop.time(), heard_s, limit_s))

    def heard(self, node: int) -> None:
        """Note that a silent node has sent a message again."""
        if node in self._deliver:
            self._carry_out(self.job.heard(node, self._loop.time()))

    def _tick(self) -> None:
        self._timer = self._timer_at_s = None
        self._carry_out(self.job.tick(self._loop.time()))

    def _carry_out(self, orders: list[Order]) -> None:
        waiting = deque(orders)
        while waiting:
            order = waiting.popleft()
            if isinstance(order, Listen):
                self._do(order)
                continue
            message = order.message
            if isinstance(message, messages.World) and self._resolve is not None:
                self._held[order.node] = message
            elif isinstance(message, messages.Stop) and self._take_back(order.node, message.attempt):
                waiting.extend(self.job.on_not_started(order.node, message.attempt, self._loop.time()))
            else:
                if isinstance(message, messages.Finish | messages.Refused | messages.DroppedFromJob):
                    self._held.pop(order.node, None)
                self._do(order)
        if self._held and not self._is_resolving and self._resolve is not None:
            self._is_resolving = True
            self._resolve(self._on_resolved)
        self._plan_tick()

    def _take_back(self, node: int, attempt: int) -> bool:
        """Withdraw the World of this attempt; return whether it was not sent yet."""
        if node not in self._held or self._held[node].attempt != attempt:
            return False
        del self._held[node]
        return True

    def _do(self, order: Order) -> None:
        if isinstance(order, Listen):
            if self.on_listen is not None:
                self.on_listen(order.on)
            return
        deliver = self._deliver.get(order.node)
        if deliver is not None:
            if isinstance(order.message, messages.World) and not order.message.first_rank:
                self._leads = order.node, order.message.attempt
            if isinstance(order.message, messages.Refused | messages.Finish | messages.DroppedFromJob):
                # This ends its connection: later messages do not concern the Job.
                del self._deliver[order.node]
                if isinstance(order.message, messages.Finish) and self.on_finish is not None:
                    self.on_finish(order.message)
                if not isinstance(order.message, messages.Finish):
                    self._forget(order.node)
                elif self._serving is not None:
                    self._serving.left(order.node)
            deliver(order.message)
            if isinstance(order.message, messages.Welcome) and self._events is not None:
                deliver(messages.WantEvents())

    def _forget(self, node: int) -> None:
        if self._events is not None:
            self._events.left(node)
        if self._serving is not None:
            self._serving.left(node)

    def _serves(self, node: int, message: messages.PeerServes) -> None:
        """Pass on a message between nodes: the Job is not involved."""
        if self._serving is None:
            from launcher.rendezvous.serving import ServingNodes

            self._serving = ServingNodes(self._loop, lambda each, found: self._do(Send(each, found)))
        self._serving.receive(node, message)

    def _tell_others(self, node: int, message: messages.FromCoordinator) -> None:
        """Send a message to all other nodes; the Job is not involved here either."""
        for other in tuple(self._deliver):
            if other != node:
                self._do(Send(other, message))

    def _on_resolved(self, pinned: messages.Pinned | None, error: str) -> None:
        """Apply the version, also to a later attempt than the requesting one: no rank has run, or saved."""
        self._is_resolving = False
        held, self._held = self._held, {}
        if error and held:
            self._carry_out(self.job.fail(error))
            return
        for node, world in held.items():
            self._do(Send(node, world._replace(checkpoint=pinned)))
        self._plan_tick()

    def _plan_tick(self) -> None:
        moment_s = self.job.deadline_s()
        if moment_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = moment_s
        self._timer = None if moment_s is None else self._loop.call_at(moment_s, self._tick)


class LocalLink:
    """The Link of the agent in the coordinator's own process."""

    def __init__(self, loop: EventLoop, host: JobHost, on_message: Deliver) -> None:
        self._loop = loop
        self._host = host
        self._on_message = on_message
        self._node = host.attach(self._queue)

    def _queue(self, message: messages.FromCoordinator) -> None:
        # Not from within the causing call: the agent would be re-entered.
        self._loop.call_soon(self._on_message, message)

    def send(self, message: messages.FromMember) -> None:
        self._loop.call_soon(self._host.receive, self._node, message)

    def reached(self, address: str) -> None:
        """Note that other nodes have reached this one at that address."""
        self._host.reached(self._node, address)

    def ship(self, batch: messages.EventBatch) -> None:
        """Deliver events of this node at once: there is no answer, and the loop may have ended."""
        self._host.receive(self._node, batch)

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        return local_ns, 0

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_closed(self) -> bool:
        return True

    def rejoin(self, master_port: int) -> None:
        raise AssertionError(f"the node of the coordinator was given up (port {master_port})")

    def close(self) -> None:
        self._host.lost(self._node, "left")
