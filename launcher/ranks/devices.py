"""The number of devices of a node, without torch: from /proc, /dev and /sys, else NVML, else nvidia-smi.

In: a kind (cpu, gpu, xpu, auto), the environment and the root of the file system (tests build their own). Out: the
count of torch.distributed.run: visible devices as CUDA, HIP and Level Zero read their variables.
BOOTSEER_DEVICE_COUNT overrides all but cpu. Also: the one visible device of a rank for --virtual-local-rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from bootseer.errors import ConfigError

T = TypeVar("T")

COUNT_VARIABLE = "BOOTSEER_DEVICE_COUNT"
_INTEL = 0x8086
_NVIDIA = 0x10DE
_SOURCES = {
    "gpu": "/proc/driver/nvidia/gpus, /dev/nvidia*, NVML, nvidia-smi and /sys/class/kfd",
    "xpu": "/sys/class/drm/renderD* (Intel devices)",
}
_VISIBLE = {
    "gpu": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


class Gpu(NamedTuple):
    """One physical GPU, in the order of the PCI bus."""

    pci: str  # 0000:dc:00.0
    uuid: str  # GPU-..., "" if unknown


def count_devices(
    kind: str, environ: Mapping[str, str], root: str = "/", path: Sequence[str] | None = None
) -> int:
    """Return the number for --nproc-per-node cpu, gpu, xpu or auto; raise ConfigError for none.

    Args: path: where to search for the ranks' torch, which decides for auto (default: sys.path of bootrun).
    """
    if kind == "cpu":
        return count_cpus()
    given = _given_count(environ)
    if kind == "auto":
        return (_count_accelerators(environ, root, path) if given is None else given) or count_cpus()
    count = {"gpu": count_gpus, "xpu": count_xpus}[kind](environ, root) if given is None else given
    if count < 1:
        raise ConfigError(_none_found(kind, environ, given))
    return count


def count_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_device_of(environ: Mapping[str, str], local_rank: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES) that shows a rank only its device, as device 0.

    HIP's variable takes precedence over CUDA's if it is set, as on ROCm.
    """
    name = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    visible = environ.get(name)
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise ConfigError(
            f"--virtual-local-rank: local rank {local_rank} has no device in {name}={visible}; "
            "lower --nproc-per-node or make more devices visible"
        )
    return devices[local_rank].strip()


def count_gpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Return the number of visible GPUs of NVIDIA or AMD; 0 for none."""
    return _count_nvidia(environ, root) or _count_amd(environ, root)


def count_xpus(environ: Mapping[str, str], root: str = "/") -> int:
    """Return the number of visible GPUs of Intel; integrated ones count only if there is no other."""
    mask = environ.get("ZE_AFFINITY_MASK")
    slots = [is_discrete for is_discrete, count in _intel_cards(environ, root) for _ in range(count)]
    if mask is not None:
        try:
            chosen = {int(part) for part in mask.split(",")}
        except ValueError:  # parts of devices, as in 0.0,0.1
            return min(len(set(mask.split(","))), len(slots)) if mask.strip() else 0
        slots = [is_discrete for index, is_discrete in enumerate(slots) if index in chosen]
    return sum(slots) or len(slots)


def list_visible_gpus(environ: Mapping[str, str], root: str = "/") -> list[Gpu]:
    """Return the GPUs as CUDA or HIP number them under CUDA_VISIBLE_DEVICES; none if /proc and /sys hide them.

    The order is that of the bus: the same as CUDA's on nodes with only one kind of GPU.
    """
    gpus = _nvidia_gpus(root) or _nvidia_by_bus(root)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        gpus = _amd_gpus(root)
        gpus = [gpus[index] for index in _pick(environ.get("ROCR_VISIBLE_DEVICES"), gpus)]
        visible = environ.get("HIP_VISIBLE_DEVICES", visible)
    return [gpus[index] for index in _pick(visible, gpus)]


# ---- counting ------------------------------------------------------------------------------------------------


def _given_count(environ: Mapping[str, str]) -> int | None:
    text = environ.get(COUNT_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{COUNT_VARIABLE}={text}: give a number of devices")
    return int(text)


def _none_found(kind: str, environ: Mapping[str, str], given: int | None) -> str:
    if given is not None:
        return f"--nproc-per-node {kind}: {COUNT_VARIABLE} is {given}"
    said = [f"{name}={environ[name]!r}" for name in _VISIBLE[kind] if name in environ]
    return (
        f"--nproc-per-node {kind}: none found in {_SOURCES[kind]}{''.join(f'; {each}' for each in said)}; "
        f"give a number or set {COUNT_VARIABLE}"
    )


def _count_accelerators(environ: Mapping[str, str], root: str, path: Sequence[str] | None) -> int:
    """Return the number of devices that the ranks' torch can use; of NVIDIA or AMD if no torch is found."""
    if path is None:
        path = () if "PYTHON_EXEC" in environ else sys.path
    kinds = torch_kinds(path)
    count = 0
    if kinds is None or "cuda" in kinds:
        count = _count_nvidia(environ, root)
    if not count and (kinds is None or "hip" in kinds):
        count = _count_amd(environ, root)
    if not count and kinds is not None and "xpu" in kinds:
        count = count_xpus(environ, root)  # any desktop has an Intel GPU: torch must be built for it
    return count


def torch_kinds(path: Iterable[str]) -> frozenset[str] | None:
    """Return for which of cuda, hip, xpu the torch on this path is built (version.py); None without torch."""
    for directory in path:
        text = _read(f"{directory or '.'}/torch/version.py")
        if text:
            return frozenset(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]", text, re.MULTILINE))
    return None


def _count_nvidia(environ: Mapping[str, str], root: str) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not parse_visible(visible):
        return 0
    if visible is not None and visible.startswith("MIG-"):
        return 1  # a CUDA process uses one MIG device even if several are listed
    gpus = _nvidia_gpus(root)
    by_uuid = visible is not None and visible.startswith("GPU-")
    if not gpus or (by_uuid and not all(gpu.uuid for gpu in gpus)):
        gpus = _ask_for_gpus(environ, root) or gpus
    if by_uuid and not any(gpu.uuid for gpu in gpus):
        return min(len(parse_visible(visible or "")), len(gpus))
    return len(_pick(visible, gpus))


def _count_amd(environ: Mapping[str, str], root: str) -> int:
    variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    if any(name in environ and not parse_visible(environ[name]) for name in variables):
        return 0
    gpus = _amd_gpus(root)
    gpus = [gpus[index] for index in _pick(environ.get("ROCR_VISIBLE_DEVICES"), gpus)]
    return len(_pick(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), gpus))


# ---- visible devices -----------------------------------------------------------------------------------------


def parse_visible(text: str) -> list[int] | list[str]:
    """Parse CUDA_VISIBLE_DEVICES as CUDA does: numbers or UUIDs up to the first bad one, none if one repeats."""
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            return _until_wrong([part if part.startswith(prefix) else None for part in text.split(",")])
    matches = (re.match(r"[+-]?\d+", part.strip()) for part in text.split(","))
    numbers = [int(match.group()) if match else -1 for match in matches]
    return _until_wrong([number if number >= 0 else None for number in numbers])


def _until_wrong(parts: Sequence[T | None]) -> list[T]:
    found: list[T] = []
    for part in parts:
        if part is None:
            break
        if part in found:
            return []
        found.append(part)
    return found


def _pick(visible: str | None, gpus: Sequence[Gpu]) -> list[int]:
    """Return the indices of the GPUs that a variable names; all for None."""
    if visible is None:
        return list(range(len(gpus)))
    wanted = parse_visible(visible)
    found = [part if isinstance(part, int) else _find_uuid(part, gpus) for part in wanted]
    return _until_wrong([index if index is not None and index < len(gpus) else None for index in found])


def _find_uuid(start: str, gpus: Sequence[Gpu]) -> int | None:
    """Return the index of the only GPU whose UUID begins with `start`."""
    matches = [index for index, gpu in enumerate(gpus) if gpu.uuid.startswith(start)]
    return matches[0] if len(matches) == 1 else None


# ---- reading devices -----------------------------------------------------------------------------------------


def _nvidia_gpus(root: str) -> list[Gpu]:
    """Return the driver's GPUs that this process may open: containers and schedulers withhold some."""
    base = os.path.join(root, "proc/driver/nvidia/gpus")
    gpus = []
    for address in _list(base):
        text = _read(f"{base}/{address}/information")
        minor = _field(text, "Device Minor")
        device = os.path.join(root, f"dev/nvidia{minor}")
        if minor and not os.access(device, os.R_OK | os.W_OK):
            continue
        uuid = _field(text, "GPU UUID")
        gpus.append(Gpu(address.lower(), "" if "?" in uuid else uuid))
    return gpus


def _nvidia_by_bus(root: str) -> list[Gpu]:
    """Return NVIDIA's display and 3D controllers, for nodes where the driver's directory is hidden."""
    base = os.path.join(root, "sys/bus/pci/devices")
    addresses = [
        address
        for address in _list(base)
        if _is_hex(_read(f"{base}/{address}/vendor"), _NVIDIA)
        and _read(f"{base}/{address}/class")[:6] in ("0x0300", "0x0302")
    ]
    # A container sees the whole bus, not only its own devices: the GPUs are known only if the counts match.
    if len(addresses) != _count_nvidia_files(root):
        return []
    return [Gpu(address.lower(), "") for address in addresses]


def _count_nvidia_files(root: str) -> int:
    directory = os.path.join(root, "dev")
    names = [name for name in _list(directory) if re.fullmatch(r"nvidia\d+", name)]
    return sum(os.access(f"{directory}/{name}", os.R_OK | os.W_OK) for name in names)


def _amd_gpus(root: str) -> list[Gpu]:
    base = os.path.join(root, "sys/class/kfd/kfd/topology/nodes")
    gpus = []
    for number in sorted(_list(base), key=lambda name: (len(name), name)):
        text = _read(f"{base}/{number}/properties")
        values = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        device = os.path.join(root, f"dev/dri/renderD{values.get('drm_render_minor', 0)}")
        if values.get("simd_count", 0) and os.access(device, os.R_OK | os.W_OK):
            where = values.get("location_id", 0)
            pci = f"{values.get('domain', 0):04x}:{where >> 8 & 255:02x}:{where >> 3 & 31:02x}.{where & 7}"
            gpus.append(Gpu(pci, f"GPU-{values.get('unique_id', 0):016x}"))
    return gpus


def _intel_cards(environ: Mapping[str, str], root: str) -> list[tuple[bool, int]]:
    """Return for each card whether it is discrete, and the number of devices that it counts as."""
    base = os.path.join(root, "sys/class/drm")
    whole = environ.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE"
    cards = []
    for name in _list(base):
        device = f"{base}/{name}/device"
        if not name.startswith("renderD") or not _is_hex(_read(f"{device}/vendor"), _INTEL):
            continue
        if os.access(os.path.join(root, "dev/dri", name), os.R_OK | os.W_OK):
            address = os.path.basename(os.path.realpath(device))
            is_discrete = not address.startswith("0000:00:")  # integrated ones sit on the root bus
            tiles = sum(re.fullmatch(r"tile\d+", part) is not None for part in _list(device))
            cards.append((is_discrete, tiles if is_discrete and tiles and not whole else 1))
    return cards


def _ask_for_gpus(environ: Mapping[str, str], root: str) -> list[Gpu]:
    """Return the GPUs that NVML or nvidia-smi report, if /proc does not list them."""
    uuids = ask_nvml() if root == "/" else None
    if uuids is None:
        uuids = [""] * _count_nvidia_files(root)
        if not uuids and root == "/" and find_program("nvidia-smi", environ):
            uuids = ask_nvidia_smi()
    return [Gpu("", uuid) for uuid in uuids]


def find_program(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of a program on PATH (shutil.which costs 8 ms of import)."""
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory or ".", name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def ask_nvml() -> list[str] | None:
    """Return the UUIDs of the GPUs from NVML; None if the library is missing or fails."""
    import ctypes

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2():
            return None
        try:
            count = ctypes.c_uint()
            if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return None
            uuids = []
            for index in range(count.value):
                handle, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(96)
                failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
                failed = failed or library.nvmlDeviceGetUUID(handle, buffer, len(buffer))
                uuids.append("" if failed else buffer.value.decode(errors="replace"))
            return uuids
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def ask_nvidia_smi() -> list[str]:
    """Return the UUIDs from `nvidia-smi -L`, the last source; empty if it fails."""
    import subprocess

    from bootseer.linux.child_processes import run_limited

    try:
        done = run_limited(["nvidia-smi", "-L"], timeout_s=20)
        done.check_returncode()
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", done.stdout.decode(errors="replace"), re.MULTILINE)


def _list(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}:[ \t]*(.*?)\s*$", text, re.MULTILINE)
    return match.group(1) if match else ""


def _is_hex(text: str, number: int) -> bool:
    try:
        return int(text, 16) == number
    except ValueError:
        return False
