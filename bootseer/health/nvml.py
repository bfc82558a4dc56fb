"""NVIDIA's library by ctypes, only the functions that checks need. Functions missing in this driver return None.

Every call may hang with a broken driver: call it in a process that may be abandoned (runner.py). Source: nvml.h of
the CUDA toolkit (signatures, error codes, bits of throttle reasons).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_UNCORRECTED, _VOLATILE = 1, 0
# Errors of a broken device: timeout, interrupts, lost, needs a reset, operating system, not found. Other codes
# mean that only this value is unavailable.
_BROKEN = {10, 11, 15, 16, 17, 28}
_NOT_SUPPORTED = 3
_SLOWDOWN = 1  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_MAX_PROCESSES = 256
_MAX_NVLINKS = 36


class NvmlError(Exception):
    """A call failed; `code` is NVML's, 0 if the library itself is missing."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Gpu(NamedTuple):
    """One device; None for unavailable values. `error`: why nothing is known about it."""

    number: int
    name: str = ""  # bus id
    error: str = ""
    temperature_c: float | None = None
    slowdown_c: float | None = None
    throttle_reasons: int | None = None  # bits
    uncorrected_volatile: int | None = None  # ECC errors since the driver was loaded
    remapped_pending: bool | None = None
    remapped_failed: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    nvlinks: tuple[bool, ...] = ()  # active or not, of its links
    processes: tuple[int, ...] = ()  # that compute on it


class DeviceUse(NamedTuple):
    """The use of a device, over some samples."""

    number: int
    busy: int  # percent of the time in which a kernel ran: minimum
    memory: int  # percent of the time in which memory was read or written: maximum
    power_w: float  # the last; 0: unavailable
    processes: tuple[int, ...]  # that compute on it


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Pci(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus_id", ctypes.c_char * 32),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, version 2 and 3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def read_gpus(library: str) -> list[Gpu]:
    """Read all devices. Raises: NvmlError if the library is missing or cannot be initialised."""
    with _initialised(library) as ask:
        count = ask.number("nvmlDeviceGetCount_v2")
        if count is None:
            raise NvmlError("the driver cannot count its devices", _NOT_SUPPORTED)
        return [_read(ask, index) for index in range(count)]


def sample_use(library: str, looks: int, between: Callable[[], object]) -> list[DeviceUse]:
    """Sample the use of all devices; [] if a value is unavailable. Raises: NvmlError as `read_gpus`.

    Args: between: waits between two samples: the driver's figures cover the last sixth of a second, or second.
    """
    uses: list[DeviceUse] = []
    with _initialised(library) as ask:
        for look in range(looks):
            if look:
                between()
            now = [_sample(ask, index) for index in range(ask.number("nvmlDeviceGetCount_v2") or 0)]
            known = [use for use in now if use is not None]
            if len(known) < len(now) or (uses and len(known) != len(uses)):
                return []
            before = uses or known
            uses = [
                new._replace(busy=min(old.busy, new.busy), memory=max(old.memory, new.memory))
                for old, new in zip(before, known, strict=True)
            ]
    return uses


@contextmanager
def _initialised(library: str) -> Iterator[_NvmlCaller]:
    """Initialise the library for a block. Raises: NvmlError."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        raise NvmlError(str(error)) from None
    ask = _NvmlCaller(nvml)
    if code := nvml.nvmlInit_v2():
        raise NvmlError(ask.words(code), code)
    try:
        yield ask
    finally:
        nvml.nvmlShutdown()


def _sample(ask: _NvmlCaller, index: int) -> DeviceUse | None:
    device, rates = ctypes.c_void_p(), _Utilization()
    if ask.code("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
        return None
    if not ask.call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates)):
        return None
    power_mw = ask.number("nvmlDeviceGetPowerUsage", device) or 0
    return DeviceUse(index, rates.gpu, rates.memory, power_mw / 1e3, _processes(ask, device))


class _NvmlCaller:
    """Caller of the library's functions."""

    def __init__(self, nvml: ctypes.CDLL) -> None:
        self._nvml = nvml

    def words(self, code: int) -> str:
        try:
            self._nvml.nvmlErrorString.restype = ctypes.c_char_p
            said: bytes | None = self._nvml.nvmlErrorString(ctypes.c_int(code))
        except AttributeError:
            said = None
        return f"{said.decode(errors='replace')} ({code})" if said else f"error {code}"

    def code(self, name: str, *args: Any) -> int:
        """Call a function and return its code."""
        function = getattr(self._nvml, name, None)
        return _NOT_SUPPORTED if function is None else int(function(*args))

    def call(self, name: str, *args: Any) -> bool:
        """Return whether the value is available. Raises: NvmlError for a broken device."""
        code = self.code(name, *args)
        if code in _BROKEN:
            raise NvmlError(f"{name}: {self.words(code)}", code)
        return not code

    def number(self, name: str, *args: Any, kind: type[Any] = ctypes.c_uint) -> int | None:
        """Return the number that a function writes to its last argument."""
        value = kind()
        return int(value.value) if self.call(name, *args, ctypes.byref(value)) else None


def _read(ask: _NvmlCaller, index: int) -> Gpu:
    device = ctypes.c_void_p()
    name = ""
    try:
        if code := ask.code("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
            return Gpu(index, error=f"it cannot be used: {ask.words(code)}")
        pci = _Pci()
        if ask.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci)):
            name = pci.bus_id.decode(errors="replace")
        long = ctypes.c_ulonglong
        pending, failed = _remapped(ask, device)
        return Gpu(
            index,
            name,
            "",
            ask.number("nvmlDeviceGetTemperature", device, ctypes.c_int(0)),
            ask.number("nvmlDeviceGetTemperatureThreshold", device, ctypes.c_int(_SLOWDOWN)),
            ask.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=long),
            ask.number(
                "nvmlDeviceGetTotalEccErrors",
                device,
                ctypes.c_int(_UNCORRECTED),
                ctypes.c_int(_VOLATILE),
                kind=long,
            ),
            pending,
            failed,
            ask.number("nvmlDeviceGetCurrPcieLinkGeneration", device),
            ask.number("nvmlDeviceGetMaxPcieLinkGeneration", device),
            ask.number("nvmlDeviceGetCurrPcieLinkWidth", device),
            ask.number("nvmlDeviceGetMaxPcieLinkWidth", device),
            _nvlinks(ask, device),
            _processes(ask, device),
        )
    except NvmlError as error:
        return Gpu(index, name, str(error))


def _remapped(ask: _NvmlCaller, device: ctypes.c_void_p) -> tuple[bool | None, bool | None]:
    values = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    if not ask.call("nvmlDeviceGetRemappedRows", device, *(ctypes.byref(value) for value in values)):
        return None, None
    return bool(values[2].value), bool(values[3].value)


def _nvlinks(ask: _NvmlCaller, device: ctypes.c_void_p) -> tuple[bool, ...]:
    """Return the states of the existing links; numbers past the last one are errors."""
    states = (
        ask.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(number)) for number in range(_MAX_NVLINKS)
    )
    return tuple(bool(active) for active in states if active is not None)


def _processes(ask: _NvmlCaller, device: ctypes.c_void_p) -> tuple[int, ...]:
    count = ctypes.c_uint(_MAX_PROCESSES)
    found = (_Process * _MAX_PROCESSES)()
    if not ask.call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found):
        return ()
    return tuple(int(found[number].pid) for number in range(min(count.value, _MAX_PROCESSES)))
