"""The floor of `bench fork`: ranks forked from a process with torch imported, gloo initialised, one all-reduce.

Nobody watches, stops or restarts anything here: it is the least that a start by fork can take. It prints, for
`fork_floor.py RANKS`, the seconds from before the forks until the last rank is past the all-reduce: of two sets of
ranks that join as launched ones do (rank 0 hosts the store), and of one that has a store listening before the
forks.
"""

import gc
import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist


def rank_main(rank: int, ranks: int, listener: socket.socket, store_listens: bool, done_fd: int) -> None:
    port = listener.getsockname()[1]
    if store_listens:
        more = {"master_listen_fd": listener.detach()} if rank == 0 else {}
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, wait_for_workers=False, **more)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    else:
        listener.close()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    os.write(done_fd, struct.pack("qd", time.monotonic_ns(), total.item()))


def fork_ranks(ranks: int, store_listens: bool) -> float:
    done_read, done_write = os.pipe()
    leave_read, leave_write = os.pipe()
    began_ns = time.monotonic_ns()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))  # a free port
    if store_listens:
        listener.listen(ranks)
    for rank in range(ranks):
        if os.fork() == 0:
            os.close(leave_write)
            rank_main(rank, ranks, listener, store_listens, done_write)
            os.read(leave_read, 1)  # ends when all are past the all-reduce, as ending takes CPU
            os._exit(0)
    listener.close()
    os.close(done_write)
    # A rank that fails closes its end: the read then comes up short, and struct raises.
    ends = [struct.unpack("qd", os.read(done_read, 16)) for _ in range(ranks)]
    os.close(leave_write)
    assert all(total == ranks for _, total in ends)
    for _ in range(ranks):
        assert os.wait()[1] == 0
    last_ns: int = max(end_ns for end_ns, _ in ends)
    return (last_ns - began_ns) / 1e9


gc.collect()
gc.freeze()
print(*[fork_ranks(int(sys.argv[1]), store_listens) for store_listens in (False, False, True)])
