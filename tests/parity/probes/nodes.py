"""Several launchers of one job on this host: static and c10d, elastic membership, lost nodes."""

from __future__ import annotations

from tests.parity.model import Absent, Agent, Better, End, Lose, Make, Probe, Send, Settle, Start, Until

C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}", "--rdzv-id", "job")
STATIC = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "{port}")
SOON = ("--rdzv-conf", "last_call_timeout=1,join_timeout=60")
WORLD = """from tell import *
tell(env=env("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
"""
SIZES = 'from tell import *\ntell(world=env("WORLD_SIZE", "RANK", "TORCHELASTIC_RESTART_COUNT"))\n'
# The first node's rank waits in its first world; every later world is told and ends well.
FIRST_WAITS = (
    SIZES
    + """
if os.environ["WORLD_SIZE"] == "1":
    mark("first-up")
    wait_for("never", 15 if os.environ.get("SHORT") else 100)
"""
)
OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# At the same moment torchrun's launchers now and then both fail to find each other.
IN_TURN = (Start(0), Until("listens"), Start(1))
JOINS = "a node that joins a running job gives all nodes a new world"
LOST = "the others continue at once, and do not wait for lost ranks"
TOGETHER = "ranks of all nodes stop at once, and do not wait for lost ranks"
JOB_STATUS = "all nodes end with the same status"


def two(first: tuple[str, ...] = (), second: tuple[str, ...] = (), **environ: str) -> tuple[Agent, Agent]:
    """Two agents that run the probe's script."""
    return Agent((*first, "{script}"), environ), Agent((*second, "{script}"), environ)


PROBES = (
    Probe(
        "two-static",
        "static: --node-rank is GROUP_RANK, and the master is as given",
        (*STATIC, "--nproc-per-node", "2"),
        two(("--node-rank", "0"), ("--node-rank", "1")),
        script=WORLD,
        flags=("--nnodes", "--node-rank", "--master-addr", "--master-port"),
        live=True,
    ),
    Probe(
        "two-static-endpoint",
        "static with --rdzv-endpoint and PET_NODE_RANK",
        ("--nnodes=2", "--rdzv-endpoint", "127.0.0.1:{port}", "--rdzv-id", "job"),
        (Agent(("{script}",), {"PET_NODE_RANK": "1"}), Agent(("{script}",), {"PET_NODE_RANK": "0"})),
        script="""from tell import *
tell(env=env("PROBE_AGENT", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "MASTER_PORT"))
""",
        flags=("--rdzv-endpoint", "--node-rank"),
    ),
    Probe(
        "two-c10d",
        "c10d: two launchers with the same endpoint, one of them hosts it",
        (*C10D, "--nnodes", "2", "--nproc-per-node", "2"),
        two(),
        steps=IN_TURN,
        script=WORLD,
        flags=("--nnodes", "--rdzv-backend", "--rdzv-endpoint"),
    ),
    Probe(
        "two-hetero",
        "nodes with different numbers of ranks",
        (*C10D, "--nnodes", "2"),
        two(("--nproc-per-node", "1"), ("--nproc-per-node", "3")),
        steps=IN_TURN,
        script='from tell import *\ntell(env=env("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"))\n',
        flags=("--nproc-per-node",),
    ),
    Probe(
        "two-roles",
        "nodes with different roles: ROLE_RANK and ROLE_WORLD_SIZE count within the role",
        (*C10D, "--nnodes", "2", "--nproc-per-node", "2"),
        two(("--role", "actor"), ("--role", "learner")),
        steps=IN_TURN,
        script='from tell import *\ntell(env=env("RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"))\n',
        flags=("--role",),
    ),
    Probe(
        "two-node-rank",
        "--node-rank with c10d",
        (*C10D, "--nnodes", "2"),
        two(("--node-rank", "1"), ("--node-rank", "0")),
        steps=IN_TURN,
        script='from tell import *\ntell(agent=env("PROBE_AGENT"))\n',
        better=(
            Better("told.r0.0.agent.PROBE_AGENT", "1", "--node-rank applies to every backend", "W15"),
            Better("told.r1.0.agent.PROBE_AGENT", "0", "--node-rank applies to every backend", "W15"),
        ),
        flags=("--node-rank",),
    ),
    Probe(
        "two-gloo",
        "a real gloo job over two launchers",
        (*C10D, "--nnodes", "2"),
        two(),
        steps=IN_TURN,
        script="""from tell import *
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
tell(sum=int(value), world=dist.get_world_size())
dist.destroy_process_group()
""",
        needs_torch=True,
    ),
    Probe(
        "two-static-gloo",
        "a real gloo job over two launchers with a static endpoint",
        STATIC,
        two(("--node-rank", "0"), ("--node-rank", "1")),
        script="""from tell import *
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
tell(sum=int(value), world=dist.get_world_size())
dist.destroy_process_group()
""",
        needs_torch=True,
    ),
    Probe(
        "elastic-alone",
        "--nnodes 1:2 with one node: starts after last_call_timeout",
        (*C10D, "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1", "{script}"),
        script=SIZES,
        flags=("--nnodes", "--rdzv-conf"),
    ),
    Probe(
        "elastic-full",
        "--nnodes 1:2 with two nodes at once: starts without waiting",
        (*C10D, "--nnodes", "1:2"),
        two(),
        steps=IN_TURN,
        script=SIZES,
        flags=("--nnodes",),
    ),
    Probe(
        "elastic-missing",
        "fewer nodes than required within join_timeout: status 1",
        (*C10D, "--nnodes", "2", "--rdzv-conf", "join_timeout=2", "{script}"),
        script=SIZES,
        facts=("status", "told", "traceback"),
        better=(Better("traceback.*", False, "one line gives the number of nodes that joined", "W7"),),
        flags=("--rdzv-conf",),
    ),
    Probe(
        "elastic-join-own-store",
        JOINS + "; for torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        (*C10D, "--nnodes", "1:2", *SOON, "--log-dir", "{logs}", "-r", "1"),
        two(**OWN),
        steps=(Start(0), Until("first-up"), Start(1)),
        script=FIRST_WAITS,
        facts=("status", "told", "attempts"),
        better=(Better("attempts", [1, 2], "no attempt directory is used twice, so no log is lost", "W6"),),
    ),
    Probe(
        "elastic-join",
        JOINS,
        (*C10D, "--nnodes", "1:2", *SOON),
        two(),
        steps=(Start(0), Until("first-up"), Start(1)),
        script=FIRST_WAITS,
        facts=("status", "told"),
        better=(
            Better("status.*", 0, "a node can join with the default settings", "W6"),
            Better("told.*.WORLD_SIZE", "2", "a node can join with the default settings", "W6"),
            Better("told.*.TORCHELASTIC_RESTART_COUNT", "0", "a node can join with the default settings", "W6"),
            Better("told.r0.1.world.RANK", "0", "a node can join with the default settings", "W6"),
            Better("told.r1.0.world.RANK", "1", "a node can join with the default settings", "W6"),
        ),
        deadline_s=110.0,
    ),
    Probe(
        "elastic-spare",
        "one node more than --nnodes requires",
        (*C10D, "--nnodes", "1"),
        two(),
        steps=(Start(0), Until("first-up"), Start(1), Settle(3.0), Make("enough"), End(0)),
        script=SIZES + 'mark("first-up")\nwait_for("enough")\n',
        facts=("status", "told"),
        better=(Better("status.1", 0, "a node that was not needed ends with the job, with status 0", "W5"),),
    ),
    Probe(
        "elastic-lost",
        "a node is lost: the others get a new world",
        (*C10D, "--nnodes", "1:2"),
        two(SHORT="1"),
        steps=(Start(0), Until("listens"), Start(1), Until("both-up"), Lose(1)),
        script=SIZES
        + """
if os.environ["WORLD_SIZE"] == "2":
    meet("up", 2)
    mark("both-up")
    if not comes("never", 12):
        tell(waited=True)
""",
        facts=("status", "told"),
        better=(
            Better("status.0", 0, LOST),
            Better("told.r0.0.waited", Absent(), LOST),
            Better("told.r0.1.world.WORLD_SIZE", "1", LOST),
            Better("told.r0.1.world.RANK", "0", LOST),
            Better("told.r0.1.world.TORCHELASTIC_RESTART_COUNT", "0", LOST),
        ),
    ),
    Probe(
        "nodes-failure",
        "a rank fails on one node: the other node's ranks",
        (*C10D, "--nnodes", "2"),
        two(),
        steps=IN_TURN,
        script="""from tell import *
catch("SIGTERM")
meet("up", 2)
if RANK == "1":
    sys.exit(3)
if not comes("never", 8):
    tell(waited=True)
""",
        facts=("status", "told"),
        better=(
            Better("status.0", 1, JOB_STATUS),
            Better("told.r0.0.waited", Absent(), TOGETHER),
            Better("told.r0.0.signals", ["SIGTERM"], TOGETHER),
        ),
    ),
    Probe(
        "nodes-restart",
        "a rank fails once on one node: which ranks restart, and with which restart count",
        (*C10D, "--nnodes", "2", "--max-restarts", "2"),
        two(**OWN),
        steps=IN_TURN,
        script="""from tell import *
tell(count=os.environ["TORCHELASTIC_RESTART_COUNT"])
catch("SIGTERM")
if comes("failed", 0):
    meet("again", 2)
    sys.exit(0)
meet("up", 2)
if RANK == "1":
    mark("failed")
    sys.exit(3)
wait_for("never", 40)
""",
        facts=("status", "told"),
        better=(Better("told.r0.1.count", "1", "the whole job has one restart count"),),
    ),
    Probe(
        "nodes-signal",
        "SIGTERM to one of two launchers",
        (*C10D, "--nnodes", "2"),
        two(),
        steps=(Start(0), Until("listens"), Start(1), Until("both-up"), Send("SIGTERM", 1)),
        script="""from tell import *
catch("SIGTERM")
meet("up", 2)
mark("both-up")
if not comes("never", 8):
    tell(waited=True)
""",
        facts=("status", "told"),
        better=(
            Better("status.*", 143, JOB_STATUS, "W8"),
            Better("told.r0.0.waited", Absent(), TOGETHER),
            Better("told.r0.0.signals", ["SIGTERM"], TOGETHER),
        ),
    ),
    Probe(
        "two-jobs",
        "two jobs on one host at the same time",
        ("{script}",),
        (Agent((), {"PET_STANDALONE": "1"}), Agent((), {"PET_STANDALONE": "1"})),
        script="""from tell import *
mark("here-" + os.environ["PROBE_AGENT"])
wait_for("here-0")
wait_for("here-1")
""",
        facts=("status",),
    ),
)
