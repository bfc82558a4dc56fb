"""Verdicts on accelerators. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN, Finding
from bootseer.health.limits import Limits

if TYPE_CHECKING:
    from bootseer.health.nvml import Gpu

_IDLE = 0x1
# Bits of nvmlClocksThrottleReasons. The software power cap (0x4) is normal on a busy GPU, and no fault.
_THROTTLED = {
    0x20: ("software slows it down because of its temperature", WARN),
    0x40: ("hardware slows it down because of its temperature", FAIL),
    0x80: ("the power supply slows it down", FAIL),
}
_HARDWARE_SLOWDOWN = 0x8
_RESET = "reset it (nvidia-smi -r) or reboot; if the error recurs replace it"
_COOL = "check fans, air flow and power supply of the node"


def judge_missing_library(expected: int | None, why: str, has_other: bool) -> list[Finding]:
    """Judge a node without NVIDIA's library. Args: why: the error; has_other: it has other accelerators."""
    if expected:
        what, way_out = f"none found: {why}", "install the driver, or give the container its devices"
        return [Finding("accelerators", FAIL, what, "", 0, expected, "GPUs", way_out)]
    if has_other:
        what = "accelerators of vendors other than NVIDIA are not checked"
        return [Finding("accelerators", UNKNOWN, what, way_out="check them with --own")]
    return [Finding("accelerators", OK, "there are none, and none were expected")]


def judge_driver(why: str) -> list[Finding]:
    """Judge a library that cannot be initialised."""
    way_out = "see dmesg; load the driver, or reboot after it was updated"
    return [Finding("accelerators", FAIL, f"NVIDIA's driver does not work: {why}", way_out=way_out)]


def judge_gpus(gpus: list[Gpu], expected: int | None, own: frozenset[int], limits: Limits) -> list[Finding]:
    """Judge all devices. Args: own: processes that may compute here (of the requesting job)."""
    findings = []
    working = sum(not gpu.error for gpu in gpus)
    if expected is not None and working != expected:
        level, what, way_out = WARN, "more work than expected", "correct the expected number"
        if working < expected:
            level, what = FAIL, "fewer work than expected"
            way_out = "see dmesg for Xids, and which devices the container has"
        findings.append(Finding("accelerators", level, what, "", working, expected, "GPUs", way_out))
    links = max((sum(gpu.nvlinks) for gpu in gpus), default=0)
    for gpu in gpus:
        if gpu.error:
            findings.append(Finding("accelerators", FAIL, gpu.error, _where(gpu), way_out=_RESET))
            continue
        findings += _memory(gpu) + _slowed(gpu, limits) + _links(gpu, links) + _other_processes(gpu, own)
    return findings or [Finding("accelerators", OK, f"{working} GPUs are healthy")]


def _where(gpu: Gpu) -> str:
    return f"GPU {gpu.number}" + (f" ({gpu.name})" if gpu.name else "")


def _memory(gpu: Gpu) -> list[Finding]:
    found = []
    if gpu.uncorrected_volatile:
        what, count = "uncorrected ECC errors since the driver was loaded", gpu.uncorrected_volatile
        found.append(Finding("accelerators", FAIL, what, _where(gpu), count, 0, "errors", _RESET))
    if gpu.remapped_failed:
        what, way_out = "a row of its memory could not be remapped", "have the device replaced"
        found.append(Finding("accelerators", FAIL, what, _where(gpu), way_out=way_out))
    elif gpu.remapped_pending:
        what, way_out = "a row of its memory will be remapped at the next reset", "reset it (nvidia-smi -r)"
        found.append(Finding("accelerators", WARN, what, _where(gpu), way_out=way_out))
    return found


def _slowed(gpu: Gpu, limits: Limits) -> list[Finding]:
    reasons = gpu.throttle_reasons or 0
    said = [words for bit, words in _THROTTLED.items() if reasons & bit]
    if reasons & _HARDWARE_SLOWDOWN and not any(level == FAIL for _, level in said):
        said.append(("hardware slows it down", FAIL))
    found = [Finding("accelerators", level, what, _where(gpu), way_out=_COOL) for what, level in said]
    if gpu.temperature_c is not None and gpu.slowdown_c:
        max_c = gpu.slowdown_c - limits.accelerator_margin_c
        if gpu.temperature_c >= max_c:
            found.append(Finding("accelerators", WARN, "hot", _where(gpu), gpu.temperature_c, max_c, "C", _COOL))
    return found


def _links(gpu: Gpu, nvlinks: int) -> list[Finding]:
    """Judge PCIe and NVLink. Args: nvlinks: the most of any GPU here; with bridges some never have all."""
    found = []
    width, most = gpu.pcie_width, gpu.pcie_width_most
    seat = "reseat the device, or have its slot inspected"
    if width is not None and most and width < most:
        what = "its PCIe link is narrow"
        found.append(Finding("accelerators", WARN, what, _where(gpu), width, most, "lanes", seat))
    speed, best = gpu.pcie_generation, gpu.pcie_generation_most
    # An idle device saves power by a slower link: that is no fault.
    is_idle = gpu.throttle_reasons is None or bool(gpu.throttle_reasons & _IDLE)
    if speed is not None and best and speed < best and not is_idle:
        what = "its PCIe link is slow although it works: generation"
        found.append(Finding("accelerators", WARN, what, _where(gpu), speed, best, "", seat))
    if sum(gpu.nvlinks) < nvlinks:
        what, way_out = "NVLinks are up", "see dmesg for Xid 74; reset all GPUs, or inspect the NVSwitches"
        found.append(Finding("accelerators", FAIL, what, _where(gpu), sum(gpu.nvlinks), nvlinks, "links", way_out))
    return found


def _other_processes(gpu: Gpu, own: frozenset[int]) -> list[Finding]:
    pids = sorted(set(gpu.processes) - own)
    if not pids:
        return []
    what = f"processes compute on it: {', '.join(map(str, pids[:8]))}"
    way_out = "end processes left by other jobs"
    return [Finding("accelerators", WARN, what, _where(gpu), len(pids), 0, "processes", way_out)]
