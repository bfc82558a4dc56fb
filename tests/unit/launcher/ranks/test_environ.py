"""The environment of ranks, against torchrun's where torch is at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from launcher.ranks.environ import rank_environ
from launcher.rendezvous.messages import World
from tests.support import Programs, clean_environ


class Job(NamedTuple):
    run_id: str = "job"
    role: str = "trainer"
    nproc: int = 4
    max_restarts: int = 3
    virtual_local_rank: bool = False
    signals_text: str = "SIGTERM,SIGINT"
    tuning: Mapping[str, str] = MappingProxyType({})


WORLD = World(
    attempt=5,
    restart_count=2,
    group_rank=1,
    group_world_size=3,
    first_rank=8,
    world_size=14,
    first_role_rank=2,
    role_world_size=6,
    master_addr="10.0.0.1",
    master_port=4711,
)


def test_all_variables_of_the_contract() -> None:
    assert rank_environ(Job(), WORLD, 3, "/log/error.json", None, {}) == {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "14",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_ERROR_FILE": "/log/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_what_the_user_has_set_stays() -> None:
    inherited = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "OTHER": "x"}
    environ = rank_environ(Job(), WORLD, 0, "", None, inherited)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "OTHER" not in environ


def test_one_rank_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in rank_environ(Job(nproc=1), WORLD, 0, "", None, {})


def test_virtual_local_rank() -> None:
    environ = rank_environ(Job(virtual_local_rank=True), WORLD, 3, "", "5", {})
    assert (environ["LOCAL_RANK"], environ["CUDA_VISIBLE_DEVICES"], environ["RANK"]) == ("0", "5", "11")


@pytest.mark.slow
@pytest.mark.leaks
def test_the_names_are_those_of_torchrun(torchrun: Programs, program: Programs) -> None:
    """What torchrun gives to two ranks of one node, variable by variable."""
    script = os.path.join(torchrun.dir, "dump.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write("import json, os; os.write(1, (json.dumps(dict(os.environ)) + '\\n').encode())")
    run = torchrun("--standalone", "--nproc-per-node", 2, script, deadline_s=60)
    found = sorted((json.loads(line) for line in run.stdout.splitlines()), key=lambda each: int(each["RANK"]))
    world = World(0, 0, 0, 1, 0, 2, 0, 2, found[0]["MASTER_ADDR"], int(found[0]["MASTER_PORT"]))
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    job = Job(found[0]["TORCHELASTIC_RUN_ID"], "default", 2, 0, signals_text=signals)
    for local_rank, theirs in enumerate(found):
        ours = rank_environ(job, world, local_rank, theirs["TORCHELASTIC_ERROR_FILE"], None, clean_environ())
        added = {name: value for name, value in theirs.items() if os.environ.get(name) != value or name in ours}
        for name in ("TMPDIR", "TORCHELASTIC_USE_AGENT_STORE"):
            added.pop(name, None)
            ours.pop(name, None)
        # import of torch in torchrun sets these for itself
        added = {name: value for name, value in added.items() if not name.startswith(("KMP_", "TORCHINDUCTOR_"))}
        assert ours == added
