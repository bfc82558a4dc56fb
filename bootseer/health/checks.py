"""The list of checks; each reads facts through the host interface (`system`) and returns findings.

In: a request. Out: tasks for the runner, one for each object that may hang by itself;
docs/guide/checks.md lists all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.health import accelerators, host, kernel_lines, network, nvml, storage, user_check
from bootseer.health import host_facts as facts
from bootseer.health.finding import FAIL, OK, Finding
from bootseer.health.host_interface import HostInterface
from bootseer.health.limits import Limits
from bootseer.health.network_facts import read_links, read_rates
from bootseer.health.runner import Task
from bootseer.health.storage_facts import probe
from bootseer.linux.cgroups import read_memory
from bootseer.linux.page_cache import is_remote_kind

MAX_MOUNTS = 64
_DRIVER_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_ANSWERED_ERRORS = {errno.EACCES, errno.EPERM}  # a mount that refuses access has answered


class Path(NamedTuple):
    """A path that a job reads, or also writes."""

    path: str
    is_written: bool
    is_probed: bool  # a file is written or read; otherwise only its space is checked


class Request(NamedTuple):
    """The objects to check. `expect_gpus`: None for any number; `nics`: those that have to work."""

    paths: tuple[Path, ...] = ()
    nics: tuple[str, ...] = ()
    expect_gpus: int | None = None
    own: tuple[str, ...] = ()
    ancestor: int = 0  # its descendants are the job's: they may compute on accelerators; 0 for none
    log_hours: float = 24.0
    interval_s: float = 1.0  # between the two readings of NIC counters
    limits: Limits = Limits()


class Check(NamedTuple):
    """A check; `make` returns its tasks: the place, and the function to run."""

    help: str
    make: Callable[[HostInterface, Request], Iterable[tuple[str, Callable[[], list[Finding]]]]]


def _one(
    look: Callable[[HostInterface, Request], list[Finding]],
) -> Callable[[HostInterface, Request], Iterable[_Part]]:
    """Return the maker of a check that is one task, of the node."""
    return lambda system, request: [("", partial(look, system, request))]


_Part = tuple[str, Callable[[], list[Finding]]]


def _memory(system: HostInterface, request: Request) -> list[Finding]:
    return host.judge_memory(read_memory(system.root), request.limits)


def _cgroup(system: HostInterface, request: Request) -> list[Finding]:
    return host.judge_cgroups(facts.read_cgroups(system), system.cpus(), request.limits)


def _files(system: HostInterface, request: Request) -> list[Finding]:
    return host.judge_files(
        facts.read_files(system), facts.read_descriptors(system, request.ancestor), request.limits
    )


def _clock(system: HostInterface, request: Request) -> list[Finding]:
    has_timesync = system.exists("run/systemd/timesync/synchronized")
    return host.judge_clock(system.clock(), has_timesync, request.limits)


def _kernel_log(system: HostInterface, request: Request) -> list[Finding]:
    return kernel_lines.judge(system.kernel_log(request.log_hours), request.log_hours)


def _disks(system: HostInterface, _request: Request) -> list[Finding]:
    return host.judge_disks(facts.read_disks(system))


def _shared_memory(system: HostInterface, request: Request) -> list[Finding]:
    return host.judge_shared_memory(system.room(system.at("dev/shm")), request.limits)


def _network(system: HostInterface, request: Request) -> list[Finding]:
    links = read_links(system)
    rates = read_rates(system, links, request.interval_s) if request.interval_s > 0 else {}
    return network.judge_links(links, rates, request.nics, request.limits)


def _names(system: HostInterface, request: Request) -> list[Finding]:
    return host.judge_lookup(*system.name_lookup(), request.limits)


def _accelerators(system: HostInterface, request: Request) -> list[Finding]:
    try:
        gpus = nvml.read_gpus(system.nvml)
    except nvml.NvmlError as error:
        # Images include the library also on nodes that have no such device.
        is_absent = not error.code or (
            error.code == _DRIVER_NOT_LOADED and not system.exists("proc/driver/nvidia/version")
        )
        if not is_absent:
            return accelerators.judge_driver(str(error))
        has_other = system.exists("dev/kfd") or bool(system.names("dev/accel"))
        return accelerators.judge_missing_library(request.expect_gpus, str(error), has_other)
    own_pids = facts.find_descendants(system, {pid for gpu in gpus for pid in gpu.processes}, request.ancestor)
    return accelerators.judge_gpus(gpus, request.expect_gpus, own_pids, request.limits)


def _mounts(system: HostInterface, request: Request) -> Iterable[_Part]:
    """Yield tasks for file systems that a server or a process serves, one each."""
    mounts = facts.read_mounts(system)
    remote = [mount for mount in mounts if is_remote_kind(mount.kind)]

    def local() -> list[Finding]:
        found = host.judge_read_only(mounts)
        if len(remote) > MAX_MOUNTS:
            what = f"only {MAX_MOUNTS} of {len(remote)} mounts of servers are checked"
            found.append(Finding("mounts", OK, what))
        return found or [Finding("mounts", OK, f"the kernel has made none of {len(mounts)} read-only")]

    def answer(mount: facts.Mount) -> list[Finding]:
        began_s = system.now_s()
        try:
            system.room(system.at(mount.point))
        except OSError as error:
            if all(each.point != mount.point for each in facts.read_mounts(system)):
                return [Finding("mounts", OK, f"{mount.kind} was unmounted during the check", mount.point)]
            if error.errno not in _ANSWERED_ERRORS:
                what, way_out = f"{mount.kind}: {error.strerror}", "remount it, or check its server"
                return [Finding("mounts", FAIL, what, mount.point, way_out=way_out)]
        return host.judge_answer(mount.point, mount.kind, system.now_s() - began_s, request.limits)

    yield "", local
    for mount in remote[:MAX_MOUNTS]:
        yield mount.point, partial(answer, mount)


def _space(system: HostInterface, request: Request) -> Iterable[_Part]:
    def look(path: Path) -> list[Finding]:
        try:
            room = system.room(path.path)
        except OSError as error:
            way_out = "name an existing path, or mount it"
            return [Finding("space", FAIL, error.strerror or "does not answer", path.path, way_out=way_out)]
        return host.judge_space(path.path, room, path.is_written, request.limits)

    return [(path.path, partial(look, path)) for path in request.paths]


def _storage(system: HostInterface, request: Request) -> Iterable[_Part]:
    def look(path: Path) -> list[Finding]:
        return storage.judge_storage(path.path, probe(system, path.path, path.is_written), request.limits)

    return [(path.path, partial(look, path)) for path in request.paths if path.is_probed]


CHECKS = {
    "memory": Check("available memory of the machine and its cgroups", _one(_memory)),
    "cgroup": Check("limits of processes and processor time of this cgroup", _one(_cgroup)),
    "files": Check("limits of descriptors, and of lockable memory for RDMA", _one(_files)),
    "shared-memory": Check("size of /dev/shm", _one(_shared_memory)),
    "clock": Check("whether the clock is synchronised", _one(_clock)),
    "space": Check("space and inodes of --path, the working directory and TMPDIR", _space),
    "storage": Check("writing and reading each --path, with its speed", _storage),
    "mounts": Check("answers of mounted file servers; mounts that the kernel has made read-only", _mounts),
    "disks": Check("states of disks, error counts of file systems, arrays", _one(_disks)),
    "network": Check("links of NICs and InfiniBand ports, their errors per second", _one(_network)),
    "names": Check("time of the name server, which torch's store asks for each rank", _one(_names)),
    "accelerators": Check(
        "NVIDIA GPUs: number, ECC, remapped rows, throttling, heat, links, other processes", _one(_accelerators)
    ),
    "kernel-log": Check("kernel messages about hardware, memory and file systems", _one(_kernel_log)),
}
OWN = "own"  # all --own together


def choose(only: Iterable[str]) -> list[str]:
    """Return the chosen checks; all if none is named. Raises: UsageError for an unknown name."""
    names = list(only) or [*CHECKS, OWN]
    for name in names:
        if name not in CHECKS and name != OWN:
            raise UsageError(f"--only {name[:80]!r}: unknown check; known are {', '.join([*CHECKS, OWN])}")
    return names


def make_tasks(system: HostInterface, request: Request, names: Iterable[str]) -> list[Task]:
    tasks = []
    for name in names:
        if name == OWN:
            tasks += [
                Task(user_check.name_of(path), path, partial(user_check.run_own, path)) for path in request.own
            ]
        else:
            tasks += [Task(name, where, run) for where, run in CHECKS[name].make(system, request)]
    return tasks


def default_paths(directory: str, temporary: str) -> tuple[Path, ...]:
    """Return the paths that every job writes to: its working directory and its temporary one."""
    return tuple(Path(path, True, False) for path in dict.fromkeys((os.path.abspath(directory), temporary)))
