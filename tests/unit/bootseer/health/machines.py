"""Machines that tests make up: files of proc, sys and dev below a folder, and a fake of NVIDIA's library."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from bootseer.health.host_interface import ClockState, FileSystemSpace, HostInterface
from tests.support import lacking

HEALTHY: Mapping[str, str] = {
    "proc/meminfo": "MemTotal: 16000000 kB\nMemFree: 900000 kB\nMemAvailable: 12000000 kB\n",
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/pids.current": "100\n",
    "sys/fs/cgroup/job/pids.max": "4096\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_periods 1000\nnr_throttled 10\n",
    "proc/sys/fs/file-nr": "2000\t0\t100000\n",
    "run/systemd/timesync/synchronized": "",
    "proc/self/mountinfo": (
        "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "21 20 0:40 / /mnt/da\\040ta rw,relatime shared:1 - nfs4 server:/data rw,vers=4.2\n"
    ),
    "sys/block/sda/device/state": "running\n",
    "sys/class/nvme/nvme0/state": "live\n",
    "sys/fs/ext4/sda1/errors_count": "0\n",
    "sys/block/md0/md/degraded": "0\n",
    "sys/fs/btrfs/uuid/devinfo/1/error_stats": "write_errs 0\nread_errs 0\n",
    "proc/net/route": (
        "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
        "eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0\n"
    ),
    "sys/class/net/eth0/device/vendor": "0x15b3",
    "sys/class/net/eth0/flags": "0x1003",
    "sys/class/net/eth0/carrier": "1",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "25000",
    "sys/class/net/eth0/duplex": "full",
    "sys/class/net/eth0/carrier_changes": "2",
    "sys/class/net/eth0/statistics/rx_errors": "7",
    "sys/class/net/eth0/statistics/rx_dropped": "7",
    "sys/class/net/veth1/flags": "0x1003",
    "sys/class/net/veth1/carrier": "0",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "3",
    "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "0",
    "sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE",
    "sys/class/infiniband/mlx5_1/ports/1/phys_state": "5: LinkUp",
    "sys/class/infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)",
    "dev/kmsg": "6,1,900000000000000000,-;usb 1-1: new device\n SUBSYSTEM=usb\n",
    "dev/shm/x": "",
}
ROOMY = FileSystemSpace(10**12, 5 * 10**11, 10**6, 5 * 10**5, False)
GOOD_CLOCK = ClockState(True, 0.0001, 0.01)


class MadeHost(HostInterface):
    """The real door before a made-up tree; what is no file is set here. `while_asleep` changes the tree."""

    def __init__(self, root: str, nvml: str = "no-such-library.so") -> None:
        super().__init__(root, nvml)
        self.rooms: dict[str, FileSystemSpace | OSError] = {}
        self.soft_limit = 65536
        self.locked: int | None = None
        self.clock_state: ClockState | None = GOOD_CLOCK
        self.lookup_s = 0.001
        self.while_asleep: Callable[[], object] = lambda: None
        self.time_s = 0.0

    def room(self, path: str) -> FileSystemSpace:
        found = self.rooms.get(path.removeprefix(self.root.rstrip("/")), ROOMY)
        if isinstance(found, OSError):
            raise found
        return found

    def file_limit(self) -> int:
        return self.soft_limit

    def locked_limit_bytes(self) -> int | None:
        return self.locked

    def cpus(self) -> int:
        return 8

    def clock(self) -> ClockState | None:
        return self.clock_state

    def name_lookup(self) -> tuple[str, float]:
        return "10.1.2.3", self.lookup_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.while_asleep()

    def now_s(self) -> float:
        return self.time_s


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def restore_tree(root: Path, files: Mapping[str, str]) -> None:
    """As `write_tree` has left it; what was changed is few files."""
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if os.fspath(path.relative_to(root)) not in files:
                path.unlink()
    changed = {name: text for name, text in files.items() if _text(root / name) != text}
    write_tree(root, changed)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Values come from the file $FAKE_NVML, "name value" a line; "error:name code" lets a call fail. */
static int find(const char *name, unsigned long long *value) {
    char line[200], key[100]; unsigned long long number; int found = 0;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%99s %llu", key, &number) == 2 && !strcmp(key, name)) { *value = number; found = 1; }
    fclose(file);
    return found;
}
static int fails(const char *name) {
    char key[100]; unsigned long long code = 0;
    snprintf(key, sizeof key, "error:%s", name);
    return find(key, &code) ? (int)code : 0;
}
static int give(const char *name, unsigned *out) {
    unsigned long long value; int code = fails(name);
    if (code) return code;
    if (!find(name, &value)) return 3;
    *out = (unsigned)value;
    return 0;
}
static int give_long(const char *name, unsigned long long *out) {
    int code = fails(name);
    if (code) return code;
    return find(name, out) ? 0 : 3;
}
typedef struct { char legacy[16]; unsigned numbers[5]; char bus[32]; } pci;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
int nvmlInit_v2(void) {
    unsigned long long hang;
    if (find("hang", &hang)) for (;;) sleep(1);
    return fails("init");
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Something else"; }
int nvmlDeviceGetCount_v2(unsigned *out) { return give("count", out); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    unsigned long long bad; int code = fails("handle");
    if (code && find("bad", &bad) && bad == index) return code;
    *out = (void *)(unsigned long)(index + 1);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, pci *out) {
    memset(out, 0, sizeof *out);
    snprintf(out->bus, sizeof out->bus, "00000000:%02lX:00.0", 16 * (unsigned long)device);
    return 0;
}
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *out) { return sensor ? 2 : give("temperature", out); }
int nvmlDeviceGetTemperatureThreshold(void *d, int kind, unsigned *out) {
    return kind == 1 ? give("slowdown", out) : 2; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *out) {
    return give_long("reasons", out); }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int counter, unsigned long long *out) {
    return kind == 1 && counter == 0 ? give_long("ecc", out) : 2; }
int nvmlDeviceGetRemappedRows(void *d, unsigned *a, unsigned *b, unsigned *pending, unsigned *failed) {
    *a = *b = 0;
    int code = give("pending", pending);
    return code ? code : give("failed", failed);
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *out) { return give("generation", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *out) { return give("generation_most", out); }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *out) { return give("width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *out) { return give("width_most", out); }
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *out) {
    unsigned long long links = 0, down = 99;
    find("nvlinks", &links); find("nvlink_down", &down);
    if (link >= links) return 2;
    *out = !((unsigned long)d == 1 && link == down);
    return 0;
}
/* The second look finds what is called ..._again, where there is such a thing. */
int nvmlDeviceGetUtilizationRates(void *d, unsigned *out) {
    static int looks; unsigned long long again;
    int is_again = ++looks > 2 && find("use_again", &again);
    int code = give(is_again ? "use_again" : "use", out);
    return code ? code : give("use_memory", out + 1);
}
int nvmlDeviceGetPowerUsage(void *d, unsigned *out) { return give("power", out); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, process *out) {
    unsigned long long pid;
    if (*count < 2) return 7;
    *count = 0;
    if (!find("process", &pid)) return 0;
    memset(out, 0, 2 * sizeof *out);
    out[0].pid = (unsigned)pid; out[1].pid = (unsigned)pid + 1;
    *count = 2;
    return 0;
}
"""
WELL = {
    "count": 2,
    "temperature": 50,
    "slowdown": 90,
    "reasons": 1,
    "ecc": 0,
    "pending": 0,
    "failed": 0,
    "generation": 5,
    "generation_most": 5,
    "width": 16,
    "width_most": 16,
    "nvlinks": 4,
}


def compile_nvml(directory: Path) -> str:
    """The library, by the compiler that builds Python's extensions here."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        lacking("no C compiler, for a fake of NVIDIA's library")
    source, library = directory / "nvml.c", directory / "libfake-nvml.so"
    source.write_text("#include <unistd.h>\n" + FAKE_NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return os.fspath(library)


def write_values(path: Path, values: Mapping[str, int]) -> None:
    path.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
