"""Jobs of 4 ranks that hang over process groups: 2 pipeline stages of 2 data-parallel ranks, and all together.

A step of a rank: activations to the next stage and gradients back (group pp), all_reduce of the gradients (dp),
all_reduce of the loss (world). What is planted, in which rank, and what has to be said of it: CAUSES. Ranks 0 and
1 are the first stage, 2 and 3 the second; 0 and 2 are one pipeline, 1 and 3 the other. Where sizes differ gloo
does not wait: it ends the rank that gets too much, and says nothing of one that gets too little.

With NCCL all ranks are on one GPU where there is but one, which NCCL accepts of processes that it takes for those
of several hosts (NCCL_HOSTID); they talk by sockets then. Its calls are only queued: the loss of each step is
read, as a training does that logs it. NCCL knows no tags, so other-tag is none there.
"""

from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    """A cause, and what has to be said."""

    rank: int
    kinds: tuple[str, ...]  # of bootseer.hangs.stuck.Kind
    what: str
    ends: bool = False  # the job: the page of its failure has to say it
    grace_s: int = 1  # what a rank that has ended has left behind lives on for so long


CAUSES = {
    "asleep": Planted(3, ("did-not-enter",), "sleeps before the all_reduce of dp"),
    "loops": Planted(1, ("did-not-enter",), "computes for ever before it sends its activations"),
    "stopped": Planted(2, ("is-stopped",), "SIGSTOP before it receives"),
    "no-send": Planted(0, ("message-without-its-end",), "leaves out a send"),
    "no-receive": Planted(2, ("message-without-its-end",), "leaves out a receive"),
    "other-tag": Planted(0, ("message-without-its-end",), "sends with another tag"),
    "other-operation": Planted(3, ("mismatch",), "broadcast where the other has all_reduce"),
    "other-order": Planted(1, ("different-order",), "all_reduce of all before that of dp"),
    "one-more": Planted(2, ("different-order",), "an all_reduce of dp that the other does not make"),
    "one-less": Planted(0, ("different-order",), "leaves out the all_reduce of dp"),
    "ended": Planted(
        1, ("has-ended",), "ends before its all_reduce; a child of it keeps the connections open", grace_s=60
    ),
    "other-size": Planted(2, ("mismatch",), "all_reduce of half the gradients: gloo ends the other", ends=True),
    "overlapped": Planted(3, ("did-not-enter",), "starts an all_reduce, and sleeps without waiting for it"),
}
NCCL_CAUSES = {
    name: planted._replace(ends=False) for name, planted in CAUSES.items() if name not in ("other-tag",)
}
AT_STEP, NCCL_AT_STEP = 400, 40
JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
cause, culprit, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
backend = sys.argv[4]
rank = int(os.environ["RANK"])
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if torch.cuda.device_count() < 4:
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
dist.init_process_group(backend)
torch.set_default_device(device)
pipes = [dist.new_group([each, each + 2], group_desc="pp") for each in (0, 1)]
datas = [dist.new_group([each, each + 1], group_desc="dp") for each in (0, 2)]
pp, dp = pipes[rank % 2], datas[rank // 2]
other = (rank + 2) % 4
beat = sys.modules["_bootseer_rank"].heartbeat
gradients, activations, loss = torch.ones(1000), torch.ones(64, 8), torch.ones(1)

def send(tag=0):
    dist.send(activations, other, group=pp, tag=tag)

def receive():
    dist.recv(torch.empty(64, 8), other, group=pp)

def sleeps():
    time.sleep(1000)

for step in range(at + 1000000):
    now = cause if step == at and rank == culprit else ""
    if now == "loops":
        while True:
            pass
    if now == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank < 2:
        if now != "no-send":
            send(7 if now == "other-tag" else 0)
        receive()
    else:
        if now != "no-receive":
            receive()
        send()
    if now == "asleep":
        sleeps()
    if now == "ended":
        if os.fork() == 0:
            sleeps()
        os._exit(0)
    if now == "other-order":
        dist.all_reduce(loss)
    if now == "other-operation":
        dist.broadcast(gradients, rank, group=dp)
    elif now == "other-size":
        dist.all_reduce(gradients[:500], group=dp)
    elif now == "overlapped":
        work = dist.all_reduce(gradients, group=dp, async_op=True)
        sleeps()
    elif now != "one-less":
        dist.all_reduce(gradients, group=dp)
    if now == "one-more":
        dist.all_reduce(gradients, group=dp)
    if now != "other-order":
        dist.all_reduce(loss)
    loss.fill_(float(loss) / 4)
    beat(step, {})
    time.sleep(0.005)
"""
