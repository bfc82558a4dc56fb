"""The tracer inside a rank: calls of torch.distributed go into a ring that is read from outside.

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
        more: "Dict[str, Any]" = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self._map: "Optional[Any]" = mmap.mmap(fd, RING_END, **more)
        self._at = GROUPS_AT
        self.serial = 0  # of the newest call
        self.pack, self._pack_tail = struct.Struct(HEAD_FORMAT).pack, struct.Struct("<QB").pack
        self._crc = import_apart("zlib").crc32

    def forget(self) -> None:
        """In a forked child."""
        self._map = None

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
        self.messages: "Dict[Tuple[int, int, int], int]" = {}  # operator, peer, tag -> so far


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
        names: "Tuple[str, ...]" = () if name in FREE else RESULTS if name in ALIKE_RESULT else ALIKE
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
        self._groups: "Dict[int, Tuple[Any, Group]]" = {}
        self._counts: "Dict[str, int]" = {}
        self._types = dict(
            (getattr(torch, name), number) for number, name in enumerate(TYPES) if hasattr(torch, name)
        )
        self._pending: "Dict[Any, Call]" = {}
        self._at_once: "Dict[int, Call]" = {}  # by thread
        self._thread = sys.modules["_thread"].get_ident
        self._unbox_group = c10d.ProcessGroup.unbox
        self._unbox_work = c10d.Work.unbox
        self._reference = sys.modules["_weakref"].ref
        self._library: "Any" = None  # its end would take the kernels away

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
        enter, leave, follow = self._make_enter(operator), self._leave, self._follow
        blocks = operator.blocks

        def kernel(keyset: "Any", *args: "Any") -> "Any":
            try:
                call = enter(args)
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

    def _make_enter(self, operator: Operator) -> "Callable[[Tuple[Any, ...]], Optional[Call]]":
        """What notes a call before it is passed on. In cells and in one piece: it runs at every call."""
        number, payload_at, group_at, peer_at = operator.number, operator.payload, operator.group, operator.peer
        tag_at, async_at, blocks, is_message = (
            operator.tag,
            operator.asynchronous,
            operator.blocks,
            operator.is_message,
        )
        ring, pending, groups, types = self._ring, self._pending, self._groups, self._types
        unbox, look_after, add_group, now_ns = (
            self._unbox_group,
            self._look_after,
            self._add_group,
            time.monotonic_ns,
        )
        pack, put = ring.pack, ring.put

        def enter(args: "Tuple[Any, ...]") -> "Optional[Call]":
            payload = first = args[payload_at if payload_at >= 0 else 0]
            while type(first) is list:
                first = first[0] if first else None
            on_cpu = first is None or first.is_cpu
            if not on_cpu and (first.is_meta or self._is_captured()):
                return None  # nothing runs now; to look at other calls would end a capture
            found = unbox(args[group_at])
            known = groups.get(id(found))
            group = known[1] if known is not None and known[0]() is found else add_group(found)
            peer = args[peer_at] if peer_at >= 0 else -1
            if peer >= 0:
                peer = group.ranks[peer] if peer < len(group.ranks) else -1
            if is_message:
                tag = args[tag_at] if tag_at < len(args) else 0
                which = number, peer, tag
                seq = group.messages[which] = group.messages.get(which, 0) + 1
            else:
                tag = 0
                seq = group.calls = group.calls + 1
            if pending:
                look_after()
            size = tensors = kind = rank_of = a = b = c = d = 0
            if payload_at >= 0 and first is not None:
                shape = first.shape
                rank_of = len(shape)
                a, b, c, d = (*shape, 0, 0, 0, 0)[:4]
                kind, size, tensors = types.get(first.dtype, 0), first.nbytes, 1
                if type(payload) is list and len(payload) > 1:
                    tensors, size = len(payload), sum([each.nbytes for each in payload])
            flags = WAITED_FOR if blocks or (0 <= async_at < len(args) and args[async_at] is False) else 0
            serial = ring.serial = ring.serial + 1
            head = pack(
                serial, seq, size, now_ns(), group.number, number, kind, tensors, peer, tag, rank_of, a, b, c, d
            )
            put(serial, head, 0, flags)
            return Call(serial, head, flags, on_cpu)

        return enter

    def _leave(self, call: Call, flags: int) -> None:
        self._ring.put(call.serial, call.head, time.monotonic_ns(), call.flags | flags)

    def _follow(self, call: Call, found: "Any") -> None:
        """Its end is seen when it is waited for, or at one of the next calls."""
        try:
            if call.flags & WAITED_FOR and call.on_cpu:
                # The very next thing that this thread waits for, without having to find its work.
                left = self._at_once.get(self._thread())
                self._at_once[self._thread()] = call
                if left is not None:
                    self._lose(left)
                return
            pending = self._pending
            if len(pending) >= MOST_PENDING:
                self._lose(pending.pop(next(iter(pending))))
            pending[self._unbox_work(found[-1] if type(found) is tuple else found)] = call
        except Exception:
            self._lose(call)

    def _lose(self, call: Call) -> None:
        self._ring.put(call.serial, call.head, 0, call.flags | LOST_SIGHT)

    def _look_after(self) -> None:
        pending, looked = self._pending, 0
        try:
            for work in list(pending):
                if looked >= LOOKED_AFTER:
                    return
                if work.is_completed():
                    call = pending.pop(work, None)
                    if call is not None:
                        self._leave(call, 0)
                else:
                    looked += 1
        except Exception:
            pass

    def step_ended(self) -> None:
        """An optimizer step: what it waited for has ended."""
        if self._pending and not self._is_captured():
            self._look_after()

    def _make_wait(self, plain: "Callable[..., Any]") -> "Callable[..., Any]":
        pending, put, leave = self._pending, self._ring.put, self._leave
        at_once, thread = self._at_once, self._thread

        def wait(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            call = pending.get(self) if pending else None
            if call is None:
                call = at_once.pop(thread(), None) if at_once else None
                if call is None:
                    return plain(self, *args, **kwargs)
                try:
                    found = plain(self, *args, **kwargs)
                except BaseException:
                    leave(call, FAILED)
                    raise
                leave(call, 0)
                return found
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
                if (
                    (call.on_cpu or not is_captured())
                    and self.is_completed()
                    and pending.pop(self, None) is not None
                ):
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
        words = [str(number), str(generation), _plain(name), _plain(label), name_runs(ranks)]
        is_kept = self._ring.add_group(("\t".join(words) + "\n").encode("ascii", "replace"))
        return Group(number if is_kept else NO_GROUP, ranks)


def _plain(text: str) -> str:
    return "".join([char if char.isprintable() else "?" for char in text[:MOST_NAME]])


def name_runs(ranks: "List[int]") -> str:
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
    """Traces from now on. Returns: what is to be called at the end of a step; None where nothing is to be traced.

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
