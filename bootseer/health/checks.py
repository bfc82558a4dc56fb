"""The checks there are, and of what each is made: facts through the door, a verdict, a finding or several.

In: a request. Out: tasks for the runner, one for each thing that may hang by itself; docs/checks.md has each.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.health import accelerators, host, kernel_lines, network, nvml, own, storage
from bootseer.health import host_facts as facts
from bootseer.health.door import Door
from bootseer.health.finding import FAIL, OK, Finding
from bootseer.health.limits import Limits
from bootseer.health.network_facts import read_links, read_rates
from bootseer.health.runner import Task
from bootseer.health.storage_facts import probe
from bootseer.storage.memory_limits import read_memory
from bootseer.storage.page_cache import is_remote_kind

MOST_MOUNTS = 64
_DRIVER_NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
_ANSWERS = {errno.EACCES, errno.EPERM}  # a mount that refuses us has answered


class Path(NamedTuple):
    """Something that a job reads, or also writes."""

    path: str
    is_written: bool
    is_probed: bool  # a file is written or read: else only its space is looked at


class Request(NamedTuple):
    """What is to be looked at. `expect_gpus`: None for as many as there are; `nics`: that have to work."""

    paths: tuple[Path, ...] = ()
    nics: tuple[str, ...] = ()
    expect_gpus: int | None = None
    own: tuple[str, ...] = ()
    ancestor: int = 0  # whose descendants are the job's: they may compute on accelerators; 0 for none
    log_hours: float = 24.0
    interval_s: float = 1.0  # over which counters of NICs are looked at
    limits: Limits = Limits()


class Check(NamedTuple):
    """`make` gives its tasks: what, where, and what to run."""

    help: str
    make: Callable[[Door, Request], Iterable[tuple[str, Callable[[], list[Finding]]]]]


def _one(look: Callable[[Door, Request], list[Finding]]) -> Callable[[Door, Request], Iterable[_Part]]:
    """A check that is one task, of the node."""
    return lambda door, request: [("", partial(look, door, request))]


_Part = tuple[str, Callable[[], list[Finding]]]


def _memory(door: Door, request: Request) -> list[Finding]:
    return host.judge_memory(read_memory(door.root), request.limits)


def _cgroup(door: Door, request: Request) -> list[Finding]:
    return host.judge_cgroups(facts.read_cgroups(door), door.cpus(), request.limits)


def _files(door: Door, request: Request) -> list[Finding]:
    return host.judge_files(facts.read_files(door), facts.read_descriptors(door, request.ancestor), request.limits)


def _clock(door: Door, request: Request) -> list[Finding]:
    has_timesync = door.exists("run/systemd/timesync/synchronized")
    return host.judge_clock(door.clock(), has_timesync, request.limits)


def _kernel_log(door: Door, request: Request) -> list[Finding]:
    return kernel_lines.judge(door.kernel_log(request.log_hours), request.log_hours)


def _disks(door: Door, _request: Request) -> list[Finding]:
    return host.judge_disks(facts.read_disks(door))


def _shared_memory(door: Door, request: Request) -> list[Finding]:
    return host.judge_shared_memory(door.room(door.at("dev/shm")), request.limits)


def _network(door: Door, request: Request) -> list[Finding]:
    links = read_links(door)
    rates = read_rates(door, links, request.interval_s) if request.interval_s > 0 else {}
    return network.judge_links(links, rates, request.nics, request.limits)


def _accelerators(door: Door, request: Request) -> list[Finding]:
    try:
        gpus = nvml.read_gpus(door.nvml)
    except nvml.NvmlError as error:
        # Images bring the library along to nodes that have no such device.
        is_absent = not error.code or (
            error.code == _DRIVER_NOT_LOADED and not door.exists("proc/driver/nvidia/version")
        )
        if not is_absent:
            return accelerators.judge_driver(str(error))
        has_other = door.exists("dev/kfd") or bool(door.names("dev/accel"))
        return accelerators.judge_missing(request.expect_gpus, str(error), has_other)
    own_pids = facts.find_descendants(door, {pid for gpu in gpus for pid in gpu.processes}, request.ancestor)
    return accelerators.judge_gpus(gpus, request.expect_gpus, own_pids, request.limits)


def _mounts(door: Door, request: Request) -> Iterable[_Part]:
    """File systems that a server or a process stands behind, each for itself."""
    mounts = facts.read_mounts(door)
    remote = [mount for mount in mounts if is_remote_kind(mount.kind)]

    def local() -> list[Finding]:
        found = host.judge_read_only(mounts)
        if len(remote) > MOST_MOUNTS:
            what = f"only {MOST_MOUNTS} of {len(remote)} mounts of servers are asked"
            found.append(Finding("mounts", OK, what))
        return found or [Finding("mounts", OK, f"none of {len(mounts)} was made read-only by the kernel")]

    def answer(mount: facts.Mount) -> list[Finding]:
        began_s = door.now_s()
        try:
            door.room(door.at(mount.point))
        except OSError as error:
            if all(each.point != mount.point for each in facts.read_mounts(door)):
                return [Finding("mounts", OK, f"{mount.kind} was unmounted meanwhile", mount.point)]
            if error.errno not in _ANSWERS:
                what, way_out = f"{mount.kind}: {error.strerror}", "mount it anew, or look at what serves it"
                return [Finding("mounts", FAIL, what, mount.point, way_out=way_out)]
        return host.judge_answer(mount.point, mount.kind, door.now_s() - began_s, request.limits)

    yield "", local
    for mount in remote[:MOST_MOUNTS]:
        yield mount.point, partial(answer, mount)


def _space(door: Door, request: Request) -> Iterable[_Part]:
    def look(path: Path) -> list[Finding]:
        try:
            room = door.room(path.path)
        except OSError as error:
            way_out = "name a path that is there, or mount it"
            return [Finding("space", FAIL, error.strerror or "does not answer", path.path, way_out=way_out)]
        return host.judge_space(path.path, room, path.is_written, request.limits)

    return [(path.path, partial(look, path)) for path in request.paths]


def _storage(door: Door, request: Request) -> Iterable[_Part]:
    def look(path: Path) -> list[Finding]:
        return storage.judge_storage(path.path, probe(door, path.path, path.is_written), request.limits)

    return [(path.path, partial(look, path)) for path in request.paths if path.is_probed]


CHECKS = {
    "memory": Check("memory that is available, of the machine and its cgroups", _one(_memory)),
    "cgroup": Check("limits of processes and processor time of this cgroup", _one(_cgroup)),
    "files": Check("limits of descriptors, and of memory that RDMA locks", _one(_files)),
    "shared-memory": Check("size of /dev/shm", _one(_shared_memory)),
    "clock": Check("whether the clock is kept right", _one(_clock)),
    "space": Check("space and inodes of --path, the working folder and TMPDIR", _space),
    "storage": Check("each --path is written and read, and how fast", _storage),
    "mounts": Check("mounts of file servers answer; none was made read-only by the kernel", _mounts),
    "disks": Check("states of disks, errors that file systems have counted, arrays", _one(_disks)),
    "network": Check("links of NICs and InfiniBand ports, their errors in a second", _one(_network)),
    "accelerators": Check(
        "NVIDIA GPUs: how many, ECC, remapped rows, throttling, heat, links, other processes", _one(_accelerators)
    ),
    "kernel-log": Check("what the kernel said of hardware, memory and file systems", _one(_kernel_log)),
}
OWN = "own"  # those of --own, together


def choose(only: Iterable[str]) -> list[str]:
    """Names of checks; all where none is named. Raises: UsageError for one that there is not."""
    names = list(only) or [*CHECKS, OWN]
    for name in names:
        if name not in CHECKS and name != OWN:
            raise UsageError(f"--only {name[:80]!r}: there are {', '.join([*CHECKS, OWN])}")
    return names


def make_tasks(door: Door, request: Request, names: Iterable[str]) -> list[Task]:
    """What the runner is to run."""
    tasks = []
    for name in names:
        if name == OWN:
            tasks += [Task(own.name_of(path), path, partial(own.run_own, path)) for path in request.own]
        else:
            tasks += [Task(name, where, run) for where, run in CHECKS[name].make(door, request)]
    return tasks


def default_paths(folder: str, temporary: str) -> tuple[Path, ...]:
    """What every job writes to: its working folder and its temporary one."""
    return tuple(Path(path, True, False) for path in dict.fromkeys((os.path.abspath(folder), temporary)))
