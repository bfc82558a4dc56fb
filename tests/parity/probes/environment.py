"""Which variables ranks have, and their values."""

from __future__ import annotations

from tests.parity.model import Probe
from tests.parity.probes.common import OWN_STORE, STANDALONE, TWO

ALL = "from tell import *\ntell(env=added_env())\n"
RANKS = """from tell import *
tell(env=env("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
"""
CUDA = 'from tell import *\ntell(local_rank=env("LOCAL_RANK"), cuda=env("CUDA_VISIBLE_DEVICES"))\n'

PROBES = (
    Probe(
        "environment",
        "all variables that ranks have and the launcher does not",
        (*TWO, "{script}"),
        script=ALL,
        better=(OWN_STORE,),
        flags=("--standalone", "--nproc-per-node"),
        live=True,
    ),
    Probe(
        "environment-plain",
        "the same without any flag: one rank, a free port, its own run id",
        ("{script}",),
        script=ALL,
        better=(OWN_STORE,),
    ),
    Probe(
        "environment-own-store",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: no shared store with torchrun either, so all facts are the same",
        (*TWO, "{script}"),
        script=ALL,
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    Probe(
        "environment-static",
        "--master-addr and --master-port on one node reach the ranks as given",
        ("--master-addr", "127.0.0.1", "--master-port", "{port}", "--nproc-per-node", "2", "{script}"),
        script='from tell import *\ntell(env=added_env(), address=os.environ["MASTER_ADDR"])\n',
        better=(OWN_STORE,),
        flags=("--master-addr", "--master-port"),
    ),
    Probe(
        "local-addr",
        "--local-addr becomes MASTER_ADDR on the node of rank 0",
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1", "{script}"),
        script='from tell import *\ntell(address=os.environ["MASTER_ADDR"])\n',
        flags=("--local-addr", "--rdzv-backend", "--rdzv-endpoint"),
    ),
    Probe(
        "run-id",
        "--rdzv-id is TORCHELASTIC_RUN_ID and begins the name of the log directory",
        (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--rdzv-id",
            "job7",
            "--log-dir",
            "{logs}",
            "{script}",
        ),
        script='from tell import *\ntell(env=env("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"))\n',
        facts=("status", "told", "tree"),
        flags=("--rdzv-id", "--log-dir"),
    ),
    Probe(
        "standalone-wins",
        "--standalone silently overrides a given backend, endpoint and id",
        (
            "--standalone",
            "--rdzv-id",
            "job7",
            "--rdzv-backend",
            "static",
            "--rdzv-endpoint",
            "nowhere.invalid:1",
            "{script}",
        ),
        script='from tell import *\ntell(env=env("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))\n',
        flags=("--standalone",),
    ),
    Probe(
        "role",
        "--role is ROLE_NAME",
        (*TWO, "--role", "trainer", "{script}"),
        script=RANKS,
        flags=("--role",),
    ),
    Probe(
        "omp-threads",
        "the user's OMP_NUM_THREADS stays",
        (*TWO, "{script}"),
        script='from tell import *\ntell(env=env("OMP_NUM_THREADS"))\n',
        environ={"OMP_NUM_THREADS": "3"},
    ),
    Probe(
        "nccl-error-handling",
        "the user's TORCH_NCCL_ASYNC_ERROR_HANDLING stays",
        (*STANDALONE, "{script}"),
        script='from tell import *\ntell(env=env("TORCH_NCCL_ASYNC_ERROR_HANDLING"))\n',
        environ={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    ),
    Probe(
        "cuda-visible-devices",
        "CUDA_VISIBLE_DEVICES reaches the ranks unchanged",
        (*TWO, "{script}"),
        script=CUDA,
        environ={"CUDA_VISIBLE_DEVICES": "3, 5"},
    ),
    Probe(
        "virtual-local-rank",
        "--virtual-local-rank: LOCAL_RANK is 0 and each rank sees its own entry of CUDA_VISIBLE_DEVICES",
        (*TWO, "--virtual-local-rank", "{script}"),
        script=CUDA,
        environ={"CUDA_VISIBLE_DEVICES": "3, 5"},
        flags=("--virtual-local-rank",),
    ),
    Probe(
        "virtual-local-rank-unset",
        "the same without CUDA_VISIBLE_DEVICES: the number of the rank",
        (*TWO, "--virtual-local-rank", "{script}"),
        script=CUDA,
        flags=("--virtual-local-rank",),
    ),
    Probe(
        "virtual-local-rank-hip",
        "HIP_VISIBLE_DEVICES overrides CUDA_VISIBLE_DEVICES, and both are set",
        (*TWO, "--virtual-local-rank", "{script}"),
        script=CUDA.replace('"CUDA_VISIBLE_DEVICES"', '"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"'),
        environ={"HIP_VISIBLE_DEVICES": "6, 7", "CUDA_VISIBLE_DEVICES": "3, 5"},
        flags=("--virtual-local-rank",),
        since="2.15.0",
    ),
    Probe(
        "virtual-local-rank-hip-empty",
        "an empty HIP_VISIBLE_DEVICES counts as unset",
        (*TWO, "--virtual-local-rank", "{script}"),
        script=CUDA.replace('"CUDA_VISIBLE_DEVICES"', '"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"'),
        environ={"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3, 5"},
        flags=("--virtual-local-rank",),
        since="2.15.0",
    ),
    Probe(
        "user-variables",
        "variables of the user arrive byte by byte, also those of an outer job that ranks do not set",
        (*STANDALONE, "{script}"),
        script="""from tell import *
names = (b"ODD", b"UNICODE", b"EMPTY", b"LINES")
tell(odd=[list(os.environb[name]) for name in names], path=os.environ["PATH"] != "",
    outer=env("TORCHELASTIC_SOMETHING", "RANK_FILE"))
""",
        environ={
            "ODD": "a\udcff\udc80b",
            "UNICODE": "größe ☃",
            "EMPTY": "",
            "LINES": "a\nb=c",
            "TORCHELASTIC_SOMETHING": "kept",
            "RANK_FILE": "kept",
        },
    ),
    Probe(
        "outer-job",
        "ranks overwrite the variables of an outer job that they set themselves",
        (*STANDALONE, "{script}"),
        script=RANKS,
        environ={
            "RANK": "7",
            "LOCAL_RANK": "7",
            "WORLD_SIZE": "8",
            "MASTER_ADDR": "elsewhere.invalid",
            "MASTER_PORT": "1",
            "GROUP_RANK": "3",
            "TORCHELASTIC_RESTART_COUNT": "5",
        },
    ),
)
