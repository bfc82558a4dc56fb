"""The environment variables that a rank gets in addition to the launcher's own. Pure.

In: the job's names and numbers, the world of the attempt, the rank's place in it. Out: torchrun's contract. One
value differs on purpose: TORCHELASTIC_USE_AGENT_STORE is False. A launcher without torch cannot host the store, so
rank 0 does.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING, Mapping
from launcher.rendezvous import messages

# Only bootrun may set these.
RANK_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
        *("BOOTSEER_CHECKPOINT", "BOOTSEER_CHECKPOINT_URL", "BOOTSEER_CHECKPOINT_VERSION"),
        *("BOOTSEER_CHECKPOINT_DIGEST", "BOOTSEER_ARENA", "BOOTSEER_SAVE_ARENA"),
    }
)


if TYPE_CHECKING:  # classes take time, and only types are needed of these
    from typing import Protocol

    from launcher.ranks.command import Entry

    class JobValues(Protocol):
        """The part of the launch specification that ranks receive."""

        @property
        def run_id(self) -> str: ...
        @property
        def role(self) -> str: ...
        @property
        def nproc(self) -> int: ...
        @property
        def max_restarts(self) -> int: ...
        @property
        def virtual_local_rank(self) -> bool: ...
        @property
        def signals_text(self) -> str: ...  # --signals-to-handle as given
        @property
        def tuning(self) -> Mapping[str, str]: ...  # variables of changed limits

    class RankOptions(JobValues, Protocol):
        """The part that also decides how ranks are started."""

        @property
        def entry(self) -> Entry: ...
        @property
        def python(self) -> str: ...
        @property
        def backend(self) -> str: ...
        @property
        def can_restart(self) -> bool: ...
        @property
        def rank_hooks(self) -> bool: ...
        @property
        def fork_ranks(self) -> str: ...
        @property
        def preload(self) -> tuple[str, ...]: ...
        @property
        def preload_timeout_s(self) -> float: ...
        @property
        def numa_binding(self) -> str | None: ...
        @property
        def record_start(self) -> bool: ...
        @property
        def image(self) -> object | None: ...


def constant_environ(job: JobValues, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are the same for all ranks of this node, in all attempts.

    Args: inherited: the launcher's environment, which the rank inherits.
    """
    environ = {
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "ROLE_NAME": job.role,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": job.signals_text,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if "OMP_NUM_THREADS" in inherited:
        environ["OMP_NUM_THREADS"] = inherited["OMP_NUM_THREADS"]
    elif job.nproc > 1:
        environ["OMP_NUM_THREADS"] = "1"
    environ.update(job.tuning)
    return environ


def rank_environ(
    job: JobValues,
    world: messages.World,
    local_rank: int,
    error_file: str,
    visible_devices: str | None,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to add for one rank.

    Args: error_file: "" for none; visible_devices: CUDA_VISIBLE_DEVICES if the rank gets its own value;
        inherited: the launcher's environment, which the rank inherits.
    """
    environ = {
        **constant_environ(job, inherited),
        "RANK": str(world.first_rank + local_rank),
        "LOCAL_RANK": "0" if job.virtual_local_rank else str(local_rank),
        "WORLD_SIZE": str(world.world_size),
        "GROUP_RANK": str(world.group_rank),
        "GROUP_WORLD_SIZE": str(world.group_world_size),
        "ROLE_RANK": str(world.first_role_rank + local_rank),
        "ROLE_WORLD_SIZE": str(world.role_world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if visible_devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        if inherited.get("HIP_VISIBLE_DEVICES"):
            environ["HIP_VISIBLE_DEVICES"] = visible_devices
    return environ
