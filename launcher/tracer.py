"""The tracer of collectives inside a rank: every call of torch.distributed goes into a ring that is read from outside.

Loaded by inside.py, by path, once torch is imported, where bootrun has made a ring behind the rank's page
(--trace-collectives); stdlib only, needs Python 3.8. Collectives are operators of torch's dispatcher (c10d::...),
also those that C++ starts: DDP's reducer, functional collectives. A kernel of ours for BackendSelect, which every
call of an operator passes and no backend uses, notes the call and passes it on. What goes to a backend's object
directly, other libraries' communication, and calls that are captured into CUDA graphs are not seen.
The format of the ring: launcher/supervise/ring.py.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Tuple

RING_AT, RING_HEAD = 64, b"BOOTRING\1\0\0\0"
HOOKED_AT = RING_AT + 24
GROUPS_AT, GROUPS_BYTES = RING_AT + 64, 16384
RECORDS_AT, SLOTS, RECORD_BYTES = GROUPS_AT + GROUPS_BYTES, 512, 76
RING_END = RECORDS_AT + SLOTS * RECORD_BYTES
HEAD_FORMAT, TAIL_FORMAT = "<QQQQHBBHiiB4I", "<QBI"
NO_GROUP = 0xFFFF
MOST_32 = 0xFFFFFFFF
WAITED_FOR, FAILED, LOST_SIGHT = 1, 2, 4
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
# The argument that has to be alike on all ranks, by its name; of other operators ranks may give different sizes.
ALIKE = ("tensors", "input_tensors", "input_tensor", "input", "inputs", "input_list")
ALIKE_RESULT = ("scatter_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")
RESULTS = ("output_tensors", "output_tensor", "outputs")
FREE = ("alltoall_", "alltoall_base_", "barrier", "monitored_barrier_", "allgather_coalesced_")
MOST_PENDING = 256  # works that are looked after; each keeps its tensors until it is seen to be complete
LOOKED_AFTER = 8  # of them at each call, oldest first
MOST_NAME = 64


class Ring:
    """Writes calls of this process; writes nothing in forked children.

    In a mapping, unlike steps: three writes a call by the kernel, each with a look at the descriptor, would cost
    more than all the rest of ours. What a script does with its descriptors does not matter to a mapping; Pythons
    before 3.13 keep one more for it, so this is for those who ask for it.
    """

    def __init__(self, fd: int, import_apart: "Callable[[str], Any]") -> None:
        struct, mmap = import_apart("struct"), import_apart("mmap")
        more = {"trackfd": False} if sys.version_info >= (3, 13) else {}  # type: Dict[str, Any]
        self._map = mmap.mmap(fd, RING_END, **more)  # type: Optional[Any]
        self._at = GROUPS_AT
        self._serial = 0
        self.pack, self._pack_tail = struct.Struct(HEAD_FORMAT).pack, struct.Struct("<QB").pack
        self._crc = import_apart("zlib").crc32

    def forget(self) -> None:
        """In a forked child."""
        self._map = None

    def next_serial(self) -> int:
        """From 1 on."""
        self._serial += 1
        return self._serial

    def put(self, serial: int, head: bytes, left_ns: int, flags: int) -> None:
        """A call, or what has become of it. `head` begins with its serial number."""
        if self._map is not None:
            data = head + self._pack_tail(left_ns, flags)
            at = RECORDS_AT + serial % SLOTS * RECORD_BYTES
            self._map[at : at + RECORD_BYTES] = data + self._crc(data).to_bytes(4, "little")

    def add_group(self, line: bytes) -> bool:
        """False where there is no room."""
        end = self._at + len(line)
        if end > RECORDS_AT or self._map is None:
            return False
        self._map[self._at : end] = line
        self._at = end
        return True

    def say_hooked(self, count: int) -> None:
        """So many operators are traced: what is not in the ring was not called."""
        if self._map is not None:
            self._map[HOOKED_AT : HOOKED_AT + 4] = count.to_bytes(4, "little")


class Group:
    """A process group as this rank knows it."""

    def __init__(self, number: int, ranks: "List[int]") -> None:
        self.number = number
        self.ranks = ranks
        self.calls = 0  # of collectives so far
        self.messages = {}  # type: Dict[Tuple[int, int, int], int]  # operator, peer, tag -> so far


class Call:
    """One call that may not have ended."""

    __slots__ = ("flags", "head", "on_cpu", "serial")

    def __init__(self, serial: int, head: bytes, flags: int, on_cpu: bool) -> None:
        self.serial = serial
        self.on_cpu = on_cpu
        self.head = head
        self.flags = flags


class Operator:
    """Which arguments of an operator say what; -1: none does."""

    def __init__(self, name: str, arguments: "List[str]") -> None:
        self.number = OPERATORS.index(name)
        self.is_message = name in ("send", "recv_", "recv_any_source_")
        names = () if name in FREE else RESULTS if name in ALIKE_RESULT else ALIKE  # type: Tuple[str, ...]
        self.payload = _find(arguments, names)
        self.group = arguments.index("process_group")
        self.peer = _find(arguments, ("root_rank", "dst", "src"))
        self.tag = _find(arguments, ("tag",))
        self.asynchronous = _find(arguments, ("async_op", "asyncOp"))
        self.blocks = name == "monitored_barrier_"


def _find(arguments: "List[str]", names: "Tuple[str, ...]") -> int:
    return next((arguments.index(name) for name in names if name in arguments), -1)


class Tracer:
    """See the module's docstring."""

    def __init__(self, ring: Ring, torch: "Any", c10d: "Any") -> None:
        self._ring = ring
        self._torch = torch
        self._c10d = c10d
        self._groups = {}  # type: Dict[int, Tuple[Any, Group]]
        self._counts = {}  # type: Dict[str, int]
        self._types = dict(
            (getattr(torch, name), number) for number, name in enumerate(TYPES) if hasattr(torch, name)
        )
        self._pending = {}  # type: Dict[Any, Call]
        self._unbox_group = c10d.ProcessGroup.unbox
        self._unbox_work = c10d.Work.unbox
        self._reference = sys.modules["_weakref"].ref
        self._now_ns = time.monotonic_ns
        self._library = None  # type: Any  # its end would take the kernels away

    def install(self) -> int:
        """Returns: how many operators are traced."""
        torch = self._torch
        ops = torch.ops.c10d
        key = "BackendSelect"
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
        self._library = torch.library.Library("c10d", "IMPL")
        count = 0
        for name in OPERATORS:
            try:
                op = getattr(ops, name).default
                operator = Operator(name, [each.name for each in op._schema.arguments])
                kernel = self._make_kernel(operator, op._handle.redispatch_boxed, after)
                self._library.impl(name, kernel, key, with_keyset=True)
                count += 1
            except Exception:
                pass  # another version has no such operator
        self._c10d.Work.wait = self._make_wait(self._c10d.Work.wait)
        return count

    # ---- calls -----------------------------------------------------------------------------------------------

    def _make_kernel(self, operator: Operator, redispatch: "Any", after: "Any") -> "Callable[..., Any]":
        enter, leave, follow = self._enter, self._leave, self._follow
        blocks = operator.blocks

        def kernel(keyset: "Any", *args: "Any") -> "Any":
            try:
                call = enter(operator, args)
            except Exception:
                call = None
            try:
                found = redispatch(keyset & after, *args)
            except BaseException:
                if call is not None:
                    leave(call, FAILED)
                raise
            if call is not None:
                if blocks:
                    leave(call, 0)
                else:
                    follow(call, found)
            return found

        return kernel

    def _enter(self, operator: Operator, args: "Tuple[Any, ...]") -> "Optional[Call]":
        size = tensors = kind = rank_of = 0
        shape = ()  # type: Any
        payload = args[operator.payload] if operator.payload >= 0 else None
        first = args[0] if payload is None else payload
        while type(first) is list:
            first = first[0] if first else None
        on_cpu = first is None or first.is_cpu
        if not on_cpu and self._is_captured():
            return None  # nothing runs now, and to look at other calls would end the capture
        if payload is not None and first is not None:
            shape = first.shape
            rank_of = len(shape)
            kind = self._types.get(first.dtype, 0)
            size, tensors = first.nbytes, 1
            if type(payload) is list and len(payload) > 1:
                tensors = len(payload)
                size = sum([each.nbytes for each in payload])
        if self._pending:
            self._look_after()
        boxed = args[operator.group]
        found = self._unbox_group(boxed)
        known = self._groups.get(id(found))
        group = known[1] if known is not None and known[0]() is found else self._add_group(found)
        if operator.is_message:
            peer = args[operator.peer] if operator.peer >= 0 else -1
            tag = args[operator.tag] if operator.tag < len(args) else 0
            peer = group.ranks[peer] if 0 <= peer < len(group.ranks) else -1
            which = operator.number, peer, tag
            seq = group.messages[which] = group.messages.get(which, 0) + 1
        else:
            peer, tag = -1, 0
            if operator.peer >= 0 and 0 <= args[operator.peer] < len(group.ranks):
                peer = group.ranks[args[operator.peer]]
            seq = group.calls = group.calls + 1
        at = operator.asynchronous
        flags = WAITED_FOR if operator.blocks or (0 <= at < len(args) and args[at] is False) else 0
        ring = self._ring
        serial = ring.next_serial()
        a, b, c, d = (*shape, 0, 0, 0, 0)[:4]
        head = ring.pack(
            *(serial, seq, size, self._now_ns(), group.number, operator.number, kind, min(tensors, 0xFFFF)),
            *(peer, tag, min(rank_of, 255), a & MOST_32, b & MOST_32, c & MOST_32, d & MOST_32),
        )
        ring.put(serial, head, 0, flags)
        return Call(serial, head, flags, on_cpu)

    def _leave(self, call: Call, flags: int) -> None:
        self._ring.put(call.serial, call.head, time.monotonic_ns(), call.flags | flags)

    def _follow(self, call: Call, found: "Any") -> None:
        """Its end is seen when it is waited for, or at one of the next calls."""
        try:
            work = self._unbox_work(found[-1] if type(found) is tuple else found)
            pending = self._pending
            if len(pending) >= MOST_PENDING:
                oldest = next(iter(pending))
                lost = pending.pop(oldest)
                self._ring.put(lost.serial, lost.head, 0, lost.flags | LOST_SIGHT)
            pending[work] = call
        except Exception:
            self._ring.put(call.serial, call.head, 0, call.flags | LOST_SIGHT)

    def _look_after(self) -> None:
        pending, looked = self._pending, 0
        for work in list(pending):
            if looked >= LOOKED_AFTER:
                return
            if work.is_completed():
                call = pending.pop(work, None)
                if call is not None:
                    self._leave(call, 0)
            else:
                looked += 1

    def step_ended(self) -> None:
        """An optimizer step: what it waited for has ended."""
        try:
            if self._pending and not self._is_captured():
                self._look_after()
        except Exception:
            pass

    def _make_wait(self, plain: "Callable[..., Any]") -> "Callable[..., Any]":
        pending, put, leave = self._pending, self._ring.put, self._leave

        def wait(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            call = pending.get(self)
            if call is None:
                return plain(self, *args, **kwargs)
            if not call.flags & WAITED_FOR:
                call.flags |= WAITED_FOR
                put(call.serial, call.head, 0, call.flags)
            try:
                found = plain(self, *args, **kwargs)
            except BaseException:
                if pending.pop(self, None) is not None:
                    leave(call, FAILED)
                raise
            try:
                # With NCCL it is not over yet: the stream waits, not this thread.
                if (call.on_cpu or not is_captured()) and self.is_completed() and pending.pop(self, None) is not None:
                    leave(call, 0)
            except Exception:
                pass
            return found

        is_captured = self._is_captured
        wait.__doc__, wait.__qualname__ = plain.__doc__, "Work.wait"
        return wait

    def _is_captured(self) -> bool:
        """Whether this thread captures a CUDA graph: events must not be asked then."""
        capturing = getattr(self._torch._C, "_cuda_isCurrentStreamCapturing", None)
        return capturing is not None and self._torch.cuda.is_initialized() and capturing()

    # ---- groups ----------------------------------------------------------------------------------------------

    def _add_group(self, found: "Any") -> Group:
        group = self._make_group(found)
        self._groups[id(found)] = self._reference(found), group
        return group

    def _make_group(self, found: "Any") -> Group:
        name = str(found.group_name)
        ranks = None
        try:
            by_rank = sys.modules["torch.distributed.distributed_c10d"]._world.pg_group_ranks[found]
            ranks = sorted(by_rank, key=by_rank.get)
        except Exception:
            pass  # made without torch.distributed's own functions
        label = str(getattr(found, "group_desc", "") or "")
        generation = self._counts[name] = self._counts.get(name, 0) + 1
        if ranks is None:
            return Group(NO_GROUP, [])
        number = sum(self._counts.values()) - 1
        words = [str(number), str(generation), _plain(name), _plain(label), _runs(ranks)]
        is_kept = self._ring.add_group(("\t".join(words) + "\n").encode("ascii", "replace"))
        return Group(number if is_kept else NO_GROUP, ranks)


def _plain(text: str) -> str:
    return "".join([char if char.isprintable() else "?" for char in text[:MOST_NAME]])


def _runs(ranks: "List[int]") -> str:
    """Ranks as START:COUNT:STEP, with commas between."""
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


def install(fd: int, import_apart: "Callable[[str], Any]") -> "Optional[Callable[[], None]]":
    """Traces from now on. Returns: what is to be called at the end of a step; None where there is nothing to trace.

    Args: fd: of the page with the ring; import_apart: imports a module of the standard library.
    """
    if os.pread(fd, len(RING_HEAD), RING_AT) != RING_HEAD:
        return None
    torch, c10d = sys.modules["torch"], sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return None  # built without torch.distributed
    ring = Ring(fd, import_apart)
    tracer = Tracer(ring, torch, c10d)
    count = tracer.install()
    os.register_at_fork(after_in_child=ring.forget)
    ring.say_hooked(count)
    return tracer.step_ended
