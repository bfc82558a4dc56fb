"""The tracer inside a rank: records calls of torch.distributed in a ring that other processes read.

Loaded by bootstrap.py, by path, once torch is imported, if bootrun has made a ring behind the rank's stats page
(--trace-collectives); stdlib only, needs Python 3.8. Wrappers of ProcessGroup's methods record calls from Python.
A kernel for torch's operators (c10d::...) and the dispatch key ADInplaceOrView, which no backend uses, records
rare forms and calls that C++ starts (DDP's reducer, functional collectives). Wrapped calls skip the kernel, since
its detour through Python costs more than all the rest. Not recorded are calls to a backend's object, communication
of other libraries, and calls that are captured into CUDA graphs.
The format of the ring: launcher/monitor/collectives/ring.py.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

RING_AT, RING_HEAD = 512, b"BOOTRING\1\0\0\0"
HOOKED_AT = RING_AT + 24
GROUPS_AT, GROUPS_BYTES = RING_AT + 64, 16384
RECORDS_AT, SLOTS, RECORD_BYTES = GROUPS_AT + GROUPS_BYTES, 512, 76
RING_END = RECORDS_AT + SLOTS * RECORD_BYTES
RECORD_FORMAT = "<QQQQHBBHiiB4IQBI"
LEFT_AT, END_AT = 63, 72  # in a record
LOW_SERIAL = 0xFFFFFFFF
NO_GROUP = 0xFFFF
WAITED_FOR, FAILED, LOST_SIGHT, IN_ORDER, ON_DEVICE = 1, 2, 4, 8, 16
# The numbers of operators and types in the ring; new ones come at the end.
OPERATORS = (
    "broadcast_ allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ allgather_coalesced_ "
    "allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_ gather_ scatter_ alltoall_ alltoall_base_ barrier monitored_barrier_ send recv_ recv_any_source_"
).split()
TYPES = (
    "other float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 "
    "float8_e4m3fn float8_e5m2"
).split()
# Names of the argument that must be alike on all ranks; for other operators its size may differ between ranks.
ALIKE = ("tensors", "input_tensors", "input_tensor", "input", "inputs", "input_list")
ALIKE_RESULT = ("scatter_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
RESULTS = ("output_tensors", "output_tensor", "outputs")
FREE = ("alltoall_", "alltoall_base_", "barrier", "monitored_barrier_", "allgather_coalesced_")
# Methods of ProcessGroup as torch.distributed calls them: operator, number of arguments, index of the one with
# the tensors that count, or with any (see FREE), type of the last one. The kernel records other forms.
METHODS = (
    ("allreduce", "allreduce_", 2, 0, "AllreduceOptions"),
    ("broadcast", "broadcast_", 2, 0, "BroadcastOptions"),
    ("reduce", "reduce_", 2, 0, "ReduceOptions"),
    ("allgather", "allgather_", 3, 1, "AllgatherOptions"),
    ("_allgather_base", "_allgather_base_", 3, 1, "AllgatherOptions"),
    ("all_gather_single", "_allgather_base_", 3, 1, "AllgatherOptions"),
    ("reduce_scatter", "reduce_scatter_", 3, 0, "ReduceScatterOptions"),
    ("_reduce_scatter_base", "_reduce_scatter_base_", 3, 0, "ReduceScatterOptions"),
    ("reduce_scatter_single", "_reduce_scatter_base_", 3, 0, "ReduceScatterOptions"),
    ("gather", "gather_", 3, 1, "GatherOptions"),
    ("scatter", "scatter_", 3, 0, "ScatterOptions"),
    ("alltoall", "alltoall_", 3, 1, "AllToAllOptions"),
    ("alltoall_base", "alltoall_base_", 5, 1, "AllToAllOptions"),
    ("all_to_all_single", "alltoall_base_", 5, 1, "AllToAllOptions"),
    ("send", "send", 3, 0, ""),
    ("recv", "recv_", 3, 0, ""),
    ("recv_anysource", "recv_any_source_", 2, 0, ""),
)
KEPT_EVERY = SLOTS // 2  # calls: records of unfinished calls are copied before their slots are reused
MAX_PENDING = 256  # works that are polled; each keeps its tensors until it is found complete
MAX_KEYSETS = 64
WATCH_S = 1.0  # without a call: then a thread polls works of a GPU
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
LOOKED_AFTER = 2  # incomplete works polled at each call, oldest first; at the end of a step all
MAX_NAME = 64


class Ring:
    """Writer of this process's calls; it writes nothing in forked children.

    Args: memory: the stats page and the ring, mapped; import_apart: imports a module of the standard library.
    """

    def __init__(self, memory: "Any", import_apart: "Callable[[str], Any]") -> None:
        struct = import_apart("struct")
        self.map = memory
        self._at = GROUPS_AT
        self.serial = 0  # of the newest call
        # Fields are in the order of writing: in a torn record the end does not match the beginning.
        self.put, self.put_left = struct.Struct(RECORD_FORMAT).pack_into, struct.Struct("<QB").pack_into

    def forget(self) -> None:
        """Stop writing, in a forked child."""
        self.map = bytearray(RING_END)

    def leave(self, serial: int, left_ns: int, flags: int) -> None:
        """Record the end of a call, unless a newer call has taken its slot."""
        at = RECORDS_AT + serial % SLOTS * RECORD_BYTES
        is_there = self.serial - serial < SLOTS
        if is_there or self.map[at + END_AT : at + RECORD_BYTES] == (serial & LOW_SERIAL).to_bytes(4, "little"):
            self.put_left(self.map, at + LEFT_AT, left_ns, flags)

    def copy(self, serial: int) -> bytes:
        """Return the record of one of the newest calls."""
        at = RECORDS_AT + serial % SLOTS * RECORD_BYTES
        return bytes(self.map[at : at + RECORD_BYTES])

    def put_back(self, serial: int, record: bytes) -> None:
        """Restore the record of a call whose slot a newer call may have taken."""
        at = RECORDS_AT + serial % SLOTS * RECORD_BYTES
        self.map[at : at + RECORD_BYTES] = record

    def add_group(self, line: bytes) -> bool:
        """Add a group. Returns: False if there is no space."""
        end = self._at + len(line)
        if end > RECORDS_AT:
            return False
        self.map[self._at : end] = line
        self._at = end
        return True

    def write_hooked(self, count: int) -> None:
        """Record how many operators are traced: a call that is not in the ring was not made."""
        self.map[HOOKED_AT : HOOKED_AT + 4] = count.to_bytes(4, "little")


class Mark:
    """A marker in a stream behind a call that returned no work. Args: event: CUDA event, recorded there."""

    def __init__(self, event: "Any", device: int) -> None:
        self.event, self.device, self.is_completed = event, device, event.query


class Group:
    """This rank's data about a process group."""

    def __init__(self, number: int, ranks: "List[int]") -> None:
        self.number = number
        self.ranks = ranks
        self.calls = 0  # of collectives so far
        self.messages: "Dict[Tuple[int, int, int], int]" = {}  # operator, peer, tag -> so far


class Operator:
    """Positions of an operator's arguments by meaning; -1: no such argument."""

    def __init__(self, name: str, arguments: "List[str]") -> None:
        self.number = OPERATORS.index(name)
        self.is_message = _is_message(name)
        names: "Tuple[str, ...]" = () if name in FREE else RESULTS if name in ALIKE_RESULT else ALIKE
        self.payload = _find(arguments, names)
        self.group = arguments.index("process_group")
        self.peer = _find(arguments, ("root_rank", "dst", "src"))
        self.tag = _find(arguments, ("tag",))
        self.asynchronous = _find(arguments, ("async_op", "asyncOp"))
        self.blocks = name == "monitored_barrier_"


def _is_message(name: str) -> bool:
    return name in ("send", "recv_", "recv_any_source_")


def _find(arguments: "List[str]", names: "Tuple[str, ...]") -> int:
    return next((arguments.index(name) for name in names if name in arguments), -1)


class Tracer:
    """The tracer inside a rank."""

    def __init__(self, ring: Ring, torch: "Any", c10d: "Any") -> None:
        self._ring = ring
        self._torch = torch
        self._c10d = c10d
        self._groups: "Dict[int, Group]" = {}  # by id of the object, as long as it lives
        self._alive: "Dict[int, Any]" = {}
        self._counts: "Dict[str, int]" = {}
        self._types = dict(
            (getattr(torch, name), number) for number, name in enumerate(TYPES) if hasattr(torch, name)
        )
        # Calls that may not have ended, by the work that is polled: serial, flags, whether on a CPU.
        self._pending: "Dict[Any, Tuple[int, int, bool]]" = {}
        self._events: "Dict[int, List[Any]]" = {}  # reusable ones, by device
        self._kept: "Dict[int, bytes]" = {}  # records of calls whose slots may be reused, by serial
        self._at_once: "Dict[int, int]" = {}  # by thread: serial of the call that it waits for next
        self._thread = sys.modules["_thread"].get_ident
        self._unbox_group = c10d.ProcessGroup.unbox
        self._unbox_work = c10d.Work.unbox
        self._reference = sys.modules["_weakref"].ref
        self._library: "Any" = None  # deleting it would remove the kernels
        self._start_thread = sys.modules["_thread"].start_new_thread
        self._is_watched = False  # a thread polls works of a GPU
        self._order = [0]  # IN_ORDER once a thread polls: otherwise ended calls would seem to block others
        self._look_after = self._make_look_after()

    def install(self) -> int:
        """Install the hooks. Returns: how many operators are traced."""
        torch = self._torch
        ops = torch.ops.c10d
        name_of_key = "ADInplaceOrView"
        key = getattr(torch._C.DispatchKey, name_of_key)
        after = torch._C._dispatch_keyset_full_after(key)
        self._library = torch.library.Library("c10d", "IMPL")
        hooked = []
        for name in OPERATORS:
            try:
                op = getattr(ops, name).default
                operator = Operator(name, [each.name for each in op._schema.arguments])
                kernel = self._make_kernel(operator, op._handle.redispatch_boxed, after)
                self._library.impl(name, kernel, name_of_key, with_keyset=True)
                hooked.append(name)
            except Exception:
                pass  # another version has no such operator
        self._c10d.Work.wait = self._make_wait(self._c10d.Work.wait)
        for method in METHODS:
            try:
                if method[1] in hooked:
                    self._replace(key, *method)
            except Exception:
                pass  # the kernel records its calls
        return len(hooked)

    # ---- calls -----------------------------------------------------------------------------------------------

    def _make_note(self, name: str) -> "Callable[..., int]":
        """Return the function that records the start of a call. It is one closure, since it runs at every call.

        Its arguments: payload: tensors that count, nested lists or None; first: the first of them, or any; peer:
        in the group. It returns the call's serial number.
        """
        number, is_message, has_payload = OPERATORS.index(name), _is_message(name), name not in FREE
        ring, pending, groups, types = self._ring, self._pending, self._groups, self._types
        look_after, keep, add_group = self._look_after, self._keep_records, self._add_group
        now_ns, put = time.monotonic_ns, self._ring.put

        def note(found: "Any", payload: "Any", first: "Any", peer: int, tag: int, flags: int) -> int:
            size = tensors = kind = rank_of = a = b = c = d = 0
            if has_payload and first is not None:
                shape = first.shape
                rank_of = len(shape)
                if rank_of == 1:
                    a = shape[0]
                elif rank_of == 2:
                    a, b = shape
                elif rank_of:
                    a, b, c, d = (*shape, 0)[:4]
                kind, size, tensors = types.get(first.dtype, 0), first.nbytes, 1
                if type(payload) is list and len(payload) > 1:
                    tensors, size = len(payload), sum([each.nbytes for each in payload])
            group = groups.get(id(found)) or add_group(found)
            if peer >= 0:
                peer = group.ranks[peer] if peer < len(group.ranks) else -1
            if is_message:
                which = number, peer, tag
                seq = group.messages[which] = group.messages.get(which, 0) + 1
            else:
                seq = group.calls = group.calls + 1
            now = now_ns()
            if pending:
                look_after(now)
                if not ring.serial % KEPT_EVERY:
                    keep()
            serial = ring.serial = ring.serial + 1
            at = RECORDS_AT + serial % SLOTS * RECORD_BYTES
            put(ring.map, at, serial, seq, size, now, group.number, number, kind, tensors, peer, tag,
                rank_of, a, b, c, d, 0, flags, serial & LOW_SERIAL)  # fmt: skip
            return serial

        return note

    def _make_kernel(self, operator: Operator, redispatch: "Any", after: "Any") -> "Callable[..., Any]":
        """Return the kernel that records calls that C++ starts."""
        note, order = self._make_note(OPERATORS[operator.number]), self._order
        unbox, leave, follow = self._unbox_group, self._leave, self._follow
        payload_at, group_at, peer_at = operator.payload, operator.group, operator.peer
        tag_at, async_at, blocks = operator.tag, operator.asynchronous, operator.blocks
        first_at, wrapped = max(payload_at, 0), self._torch._C.DispatchKey.Python
        unbox_work, is_captured, pending = self._unbox_work, self._is_captured, self._pending
        # By key set: the keys for the next kernel, and whether to record the call: not if a subclass of Tensor or
        # a mode converts it.
        known: "Dict[int, Tuple[Any, bool]]" = {}
        after.raw_repr()  # if torch lacks it, only this kernel fails, not the calls

        def learn(keyset: "Any") -> "Tuple[Any, bool]":
            if len(known) > MAX_KEYSETS:
                known.clear()
            found = known[keyset.raw_repr()] = keyset & after, not keyset.has(wrapped)
            return found

        def kernel(keyset: "Any", *args: "Any") -> "Any":
            serial = flags = 0
            on_cpu = False
            rest, is_ours = known.get(keyset.raw_repr()) or learn(keyset)
            try:
                if is_ours:
                    payload = first = args[first_at]
                    while type(first) is list:
                        first = first[0] if first else None
                    on_cpu = first is None or first.is_cpu
                    # Otherwise nothing runs now, and polling other calls would end a capture.
                    if on_cpu or not (first.is_meta or is_captured()):
                        peer = args[peer_at] if peer_at >= 0 else -1
                        tag = args[tag_at] if 0 <= tag_at < len(args) else 0
                        if blocks or (0 <= async_at < len(args) and args[async_at] is False):
                            flags = WAITED_FOR
                        if not on_cpu:
                            flags |= ON_DEVICE | order[0] if flags else ON_DEVICE
                        serial = note(unbox(args[group_at]), payload, first, peer, tag, flags)
            except Exception:
                pass
            if not serial:
                return redispatch(rest, *args)
            try:
                found = redispatch(rest, *args)
            except BaseException:
                leave(serial, flags | FAILED)
                raise
            if blocks:
                leave(serial, flags)
                return found
            try:
                if flags and on_cpu:  # its work need not be polled
                    follow(serial, None, flags, on_cpu, first)
                    return found
                work = found[-1] if type(found) is tuple else found
                work = None if work is None else unbox_work(work)
                if on_cpu and len(pending) < MAX_PENDING:
                    pending[work] = serial, flags, on_cpu
                else:
                    follow(serial, work, flags, on_cpu, first)
            except Exception:
                leave(serial, flags | LOST_SIGHT, 0)
            return found

        return kernel

    def _replace(self, key: "Any", name: str, operator: str, count: int, tensors_at: int, options: str) -> None:
        """Make a method of ProcessGroup record its calls from Python, without the kernel."""
        C = self._torch._C
        is_excluded, exclude = C._dispatch_tls_is_dispatch_key_excluded, C._dispatch_tls_set_dispatch_key_excluded
        plain = self._c10d.ProcessGroup.__dict__[name]
        kind = getattr(self._c10d, options) if options else int
        has_root = hasattr(kind, "rootRank")
        if options and not hasattr(kind, "asyncOp"):
            return  # an older torch
        is_message, last, note = not options, count - 1, self._make_note(operator)
        leave, follow, is_captured, order = self._leave, self._follow, self._is_captured, self._order
        tensor, parameter = self._torch.Tensor, sys.modules["torch.nn.parameter"].Parameter

        def method(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            if kwargs or len(args) != count or type(args[last]) is not kind:
                return plain(self, *args, **kwargs)
            payload = first = args[tensors_at]
            while type(first) is list and first:
                first = first[0]
            # Other types may have no memory; the kernel records the tensors that they become.
            if type(first) is not tensor and type(first) is not parameter:
                return plain(self, *args)
            serial = flags = 0
            on_cpu = first.is_cpu
            if not on_cpu and (first.is_meta or is_captured()):
                return plain(self, *args)
            try:
                if is_message:
                    flags = 0 if on_cpu else ON_DEVICE
                    serial = note(self, payload, first, args[1] if last == 2 else -1, args[last], flags)
                else:
                    how = args[last]
                    flags = 0 if how.asyncOp else WAITED_FOR
                    if not on_cpu:
                        flags |= ON_DEVICE | order[0] if flags else ON_DEVICE
                    serial = note(self, payload, first, how.rootRank if has_root else -1, 0, flags)
            except Exception:
                pass
            was_excluded = is_excluded(key)
            if not was_excluded:
                exclude(key, True)
            try:
                found = plain(self, *args)
            except BaseException:
                if serial:
                    leave(serial, flags | FAILED)
                raise
            finally:
                if not was_excluded:
                    exclude(key, False)
            if serial:
                follow(serial, found, flags, on_cpu, first)
            return found

        # From this name pybind11 concludes that no Python class has overridden the method.
        method.__code__ = method.__code__.replace(co_name=name)
        method.__name__, method.__doc__, method.__qualname__ = name, plain.__doc__, "ProcessGroup." + name
        method.__dict__["_torchdynamo_disable"] = True
        setattr(self._c10d.ProcessGroup, name, method)

    def _leave(self, serial: int, flags: int, left_ns: int = -1) -> None:
        self._ring.leave(serial, time.monotonic_ns() if left_ns < 0 else left_ns, flags)

    def _mark(self, device: "Any") -> Mark:
        cuda = self._torch.cuda
        spare = self._events.setdefault(device.index, [])
        event = spare.pop() if spare else cuda.Event()
        event.record(cuda.current_stream(device))
        return Mark(event, device.index)

    def _follow(self, serial: int, work: "Any", flags: int, on_cpu: bool, first: "Any" = None) -> None:
        """Arrange to detect the end of a call, when it is waited for or at one of the next calls."""
        if flags and on_cpu:
            # The thread's next wait is for this call, so its work need not be found.
            thread = self._thread()
            left = self._at_once.get(thread)
            self._at_once[thread] = serial
            if left is not None:
                self._leave(left, WAITED_FOR | LOST_SIGHT, 0)
            return
        try:
            if work is None:
                # With the flag, the stream waits for it; without, it is one of several calls started together.
                if on_cpu or not flags & WAITED_FOR:
                    raise ValueError(work)
                work = self._mark(first.device)
            pending = self._pending
            if len(pending) >= MAX_PENDING:
                oldest, its_flags, _ = pending.pop(next(iter(pending)))
                self._kept.pop(oldest, None)
                self._leave(oldest, its_flags | LOST_SIGHT, 0)
            pending[work] = serial, flags, on_cpu
            if not on_cpu and not self._is_watched:
                self._watch()
        except Exception:
            self._leave(serial, flags | LOST_SIGHT, 0)

    def _make_look_after(self) -> "Callable[..., None]":
        pending, kept, leave, events = self._pending, self._kept, self._ring.leave, self._events

        def look_after(now: int, most: int = LOOKED_AFTER) -> None:
            looked = 0
            try:
                for work in tuple(pending):
                    if work.is_completed():
                        call = pending.pop(work, None)
                        if call is None:
                            continue  # another thread has seen it too
                        serial, flags, _ = call
                        leave(serial, now, flags)
                        if type(work) is Mark:
                            events[work.device].append(work.event)
                        if kept:
                            kept.pop(serial, None)
                    else:
                        looked += 1
                        if looked >= most:
                            return
            except Exception:
                return  # a work that cannot be polled: the job's own call continues

        return look_after

    def _keep_records(self) -> None:
        for serial, _, _ in tuple(self._pending.values()):
            if serial not in self._kept and self._ring.serial - serial < SLOTS:
                self._kept[serial] = self._ring.copy(serial)

    def _watch(self) -> None:
        """Start a thread that polls works of a GPU while this one makes no calls: it may then wait in CUDA, and
        calls may have ended since its last poll."""
        self._is_watched = True
        try:
            self._start_thread(self._look_now_and_then, (sys.modules["ctypes"],))  # torch has loaded it
        except Exception:
            pass  # they are polled at the next call

    def _look_now_and_then(self, ctypes: "Any") -> None:
        ring, pending, sleep = self._ring, self._pending, time.sleep
        last = 0
        try:
            # In the default mode, querying an event would end a capture of another thread.
            mode = ctypes.c_int(RELAXED)
            if ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
                return
            self._order[0] = IN_ORDER
            while True:
                sleep(WATCH_S)
                if pending and ring.serial == last:
                    self._look_after(time.monotonic_ns(), MAX_PENDING)
                last = ring.serial
        except Exception:
            pass  # not an NVIDIA GPU

    def step_ended(self) -> None:
        """Record the end of calls that an optimizer step has waited for."""
        if self._pending and not self._is_captured():
            self._look_after(time.monotonic_ns(), MAX_PENDING)

    def _make_wait(self, plain: "Callable[..., Any]") -> "Callable[..., Any]":
        pending, kept, ring, leave = self._pending, self._kept, self._ring, self._leave
        at_once, thread, order = self._at_once, self._thread, self._order

        def wait(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            call = pending.get(self) if pending else None
            if call is None:
                serial = at_once.pop(thread(), 0) if at_once else 0
                if not serial:
                    return plain(self, *args, **kwargs)
                try:
                    found = plain(self, *args, **kwargs)
                except BaseException:
                    leave(serial, WAITED_FOR | FAILED)
                    raise
                leave(serial, WAITED_FOR)
                return found
            serial, flags, on_cpu = call
            if not flags & WAITED_FOR:
                flags |= WAITED_FOR
                if not on_cpu and ring.serial == serial:  # else other calls run at the same time
                    flags |= order[0]
                pending[self] = serial, flags, on_cpu
                if ring.serial - serial >= SLOTS and serial in kept:
                    ring.put_back(serial, kept[serial])
                leave(serial, flags, 0)
            try:
                found = plain(self, *args, **kwargs)
            except BaseException:
                if pending.pop(self, None) is not None:
                    leave(serial, flags | FAILED)
                    kept.pop(serial, None)
                raise
            try:
                # With NCCL the call is not over yet: the stream waits, not this thread.
                if (on_cpu or not is_captured()) and self.is_completed() and pending.pop(self, None) is not None:
                    leave(serial, flags)
                    kept.pop(serial, None)
            except Exception:
                pass
            return found

        is_captured = self._is_captured
        wait.__doc__, wait.__qualname__ = plain.__doc__, "Work.wait"
        return wait

    def _is_captured(self) -> bool:
        """Return whether this thread captures a CUDA graph, during which events must not be queried."""
        capturing = getattr(self._torch._C, "_cuda_isCurrentStreamCapturing", None)
        return capturing is not None and self._torch.cuda.is_initialized() and capturing()

    # ---- groups ----------------------------------------------------------------------------------------------

    def _add_group(self, found: "Any") -> Group:
        group, number, groups, alive = self._make_group(found), id(found), self._groups, self._alive

        def forget(_reference: "Any") -> None:
            groups.pop(number, None)
            alive.pop(number, None)

        alive[number] = self._reference(found, forget)
        groups[number] = group
        return group

    def _make_group(self, found: "Any") -> Group:
        name = str(found.group_name)
        ranks = None
        try:
            by_rank = sys.modules["torch.distributed.distributed_c10d"]._world.pg_group_ranks[found]
            ranks = sorted(by_rank, key=by_rank.get)
        except Exception:
            pass  # made without the functions of torch.distributed
        label = str(getattr(found, "group_desc", "") or "")
        generation = self._counts[name] = self._counts.get(name, 0) + 1
        if ranks is None:
            return Group(NO_GROUP, [])
        number = sum(self._counts.values()) - 1
        words = [str(number), str(generation), _plain(name), _plain(label), name_runs(ranks)]
        is_kept = self._ring.add_group(("\t".join(words) + "\n").encode("ascii", "replace"))
        return Group(number if is_kept else NO_GROUP, ranks)


def _plain(text: str) -> str:
    return "".join([char if char.isprintable() else "?" for char in text[:MAX_NAME]])


def name_runs(ranks: "List[int]") -> str:
    """Return ranks as START:COUNT:STEP, separated by commas."""
    found = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found.append("%d:%d:%d" % (ranks[at], end - at, step))
        at = end
    return ",".join(found)


def install(
    fd: int, import_apart: "Callable[[str], Any]", map_file: "Callable[[int, int], memoryview]"
) -> "Optional[Callable[[], None]]":
    """Begin tracing. Returns: a function to call at the end of a step; None if nothing is to be traced.

    Args: fd: of the stats page with the ring; import_apart: imports a module of the standard library; map_file:
    maps so many bytes of a file.
    """
    if os.pread(fd, len(RING_HEAD), RING_AT) != RING_HEAD:
        return None
    torch, c10d = sys.modules["torch"], sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return None  # built without torch.distributed
    ring = Ring(map_file(fd, RING_END), import_apart)
    tracer = Tracer(ring, torch, c10d)
    count = tracer.install()
    os.register_at_fork(after_in_child=ring.forget)
    ring.write_hooked(count)
    return tracer.step_ended
