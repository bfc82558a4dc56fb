"""A mount as programs read it: dd, cp, mmap, many readers, and a source that fails."""

from __future__ import annotations

import errno
import filecmp
import mmap
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.mounts.fuse.streams import START_BYTES
from tests.integration import mounting
from tests.integration.mounting import Mount, expected

mount = mounting.mount  # the fixture
pytestmark = pytest.mark.system
MIB = 1 << 20


def test_names_sizes_and_free_space(mount: Mount) -> None:
    at = mount({"model.safetensors": 5 * MIB + 3, "rank0/a.distcp": 0, "rank0/deep/b": 7, "rank1/c": 1})
    assert sorted(os.listdir(at.folder)) == ["model.safetensors", "rank0", "rank1"]
    assert sorted(os.listdir(at.path("rank0"))) == ["a.distcp", "deep"]
    found = os.stat(at.path("model.safetensors"))
    assert (found.st_size, found.st_mode & 0o777, found.st_mtime_ns) == (5 * MIB + 3, 0o444, 10**18)
    assert found.st_blocks == -(-(5 * MIB + 3) // 512)
    assert os.stat(at.path("rank0/a.distcp")).st_size == 0
    assert at.read("rank0/a.distcp") == b""
    assert at.read("rank0/deep/b") == expected("rank0/deep/b", 7)
    space = os.statvfs(at.folder)
    assert space.f_blocks * space.f_frsize >= 5 * MIB
    assert space.f_bavail == 0
    assert os.getxattr(at.path("rank1/c"), "user.bootseer.version") == b"made-up"
    with pytest.raises(FileNotFoundError):
        os.stat(at.path("rank2"))
    with pytest.raises(NotADirectoryError):
        os.stat(at.path("rank1/c/d"))
    for change in (
        lambda: os.open(at.path("new"), os.O_WRONLY | os.O_CREAT),
        lambda: os.open(at.path("rank1/c"), os.O_WRONLY | os.O_APPEND),
        lambda: os.unlink(at.path("rank1/c")),
        lambda: os.mkdir(at.path("folder")),
        lambda: os.rename(at.path("rank1/c"), at.path("rank1/d")),
    ):
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize("checked_bytes", [0, MIB, 3 * MIB])
def test_dd_and_cp_see_the_bytes(mount: Mount, tmp_path, checked_bytes: int) -> None:
    size = 21 * MIB + 12345
    at = mount({"file": (size, checked_bytes)})
    want = expected("file", size)
    for block in ("4k", "1M", "8M"):
        copy = tmp_path / block
        subprocess.run(["dd", f"if={at.path('file')}", f"of={copy}", f"bs={block}", "status=none"], check=True)
        assert copy.read_bytes() == want
    subprocess.run(["cp", at.path("file"), tmp_path / "cp"], check=True)
    assert filecmp.cmp(tmp_path / "cp", tmp_path / "8M", shallow=False)
    asked = at.end()["asked"]
    if checked_bytes:
        assert all(offset % checked_bytes == 0 for _, offset, _ in asked), "whole units"
        assert all(length == min(checked_bytes, size - offset) for _, offset, length in asked)
    # The kernel keeps what was read. What came before a reader was known as one comes once more with its chunk.
    assert sum(length for _, _, length in asked) <= size + (0 if checked_bytes else START_BYTES)


def test_sequential_reader_has_a_window_in_flight(mount: Mount) -> None:
    """What stripes are for: many units at once for one dd."""
    size = 96 * MIB
    at = mount({"file": (size, MIB)}, latency_s=0.05, window_bytes=32 * MIB)
    with open(at.path("file"), "rb", buffering=0) as file:
        while file.read(8 * MIB):
            pass
    found = at.end()
    assert found["max_in_flight"] >= 16
    offsets = [offset for _, offset, _ in found["asked"]]
    assert sorted(offsets) == list(range(0, size, MIB)), "each unit once"
    # Not far ahead of the reader either: the window is bounded.
    assert all(offset <= index * MIB + 33 * MIB for index, offset in enumerate(offsets))


def test_reader_that_jumps_reads_nothing_ahead(mount: Mount) -> None:
    size = 64 * MIB
    at = mount({"plain": size, "units": (size, MIB)}, latency_s=0.001)
    pick = random.Random(1)
    for name in ("plain", "units"):
        fd = os.open(at.path(name), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        want = expected(name, size)
        for _ in range(60):
            offset = pick.randrange(0, size - 4096)
            assert os.pread(fd, 4096, offset) == want[offset : offset + 4096]
        os.close(fd)
    with open(at.path("plain"), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        for _ in range(20):
            offset = pick.randrange(0, size)
            assert area[offset] == expected("plain", size)[offset]
    asked = at.end()["asked"]
    # Around a fault the kernel reads a MiB.
    assert sum(length for name, _, length in asked if name == "plain") <= 60 * 3 * 4096 + 20 * 2 * MIB
    units = {offset for name, offset, _ in asked if name == "units"}
    assert len(units) <= 61 * 2


def test_parallel_readers_of_one_descriptor_read_ahead_each(mount: Mount) -> None:
    size = 64 * MIB
    at = mount({"file": size}, latency_s=0.01)
    want = expected("file", size)
    fd = os.open(at.path("file"), os.O_RDONLY)

    def read(part: int) -> bool:
        begin = part * 16 * MIB
        return all(os.pread(fd, MIB, at_) == want[at_ : at_ + MIB] for at_ in range(begin, begin + 16 * MIB, MIB))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    os.close(fd)
    assert at.end()["max_in_flight"] > 4


def test_hundred_readers_share_what_is_read(mount: Mount) -> None:
    files = {"shared": 8 * MIB, **{f"own{number}": MIB + number for number in range(50)}}
    at = mount(files, latency_s=0.002, window_bytes=8 * MIB)
    failures: list[str] = []

    def read(number: int) -> None:
        name = "shared" if number % 2 else f"own{number // 2}"
        if at.read(name) != expected(name, files[name]):
            failures.append(name)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    asked = at.end()["asked"]
    assert sum(length for name, _, length in asked if name == "shared") <= 1.5 * 8 * MIB


def test_many_small_files(mount: Mount) -> None:
    files = {f"folder{number % 7}/file{number}": number for number in range(1000)}
    at = mount(files)
    for name, size in files.items():
        assert at.read(name) == expected(name, size)
    assert sum(len(names) for _, _, names in os.walk(at.folder)) == 1000


def test_mapped_memory(mount: Mount) -> None:
    size = 9 * MIB + 5
    at = mount({"file": (size, 4 * MIB)})
    want = expected("file", size)
    with open(at.path("file"), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area:
        assert area[size - 100 :] == want[size - 100 :]
        assert area[:] == want


TENSORS = """
import os, sys, torch, safetensors.torch
want = {f"w{i}": torch.arange(300_000, dtype=torch.float32) * i for i in range(8)}
folder = sys.argv[1]
def check():
    a = safetensors.torch.load_file(folder + "/m.safetensors")
    b = torch.load(folder + "/m.pt")
    c = torch.load(folder + "/m.pt", mmap=True)
    for got in (a, b, c):
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
os.mkdir(folder)
safetensors.torch.save_file(want, folder + "/m.safetensors")
torch.save(want, folder + "/m.pt")
check()
open(folder + "/.commit", "w").close()
for name in ("m.safetensors", "m.pt"):
    fd = os.open(folder + "/" + name, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # from here on it comes from the version
    os.close(fd)
check()
print("equal")
"""


def test_torch_and_safetensors_read_what_they_wrote(mount: Mount) -> None:
    """Unmodified: they write to a mount, and read from it before and after it is a version."""
    at = mount(writable=True)
    run = subprocess.run([sys.executable, "-c", TENSORS, at.path("step-5")], capture_output=True, text=True)
    assert run.stdout == "equal\n", run.stderr
    assert at.versions() == ["01-step5"]
    assert at.saved("01-step5").keys() == {"step-5/m.safetensors", "step-5/m.pt"}


@pytest.mark.parametrize(("how", "says"), [("digest", "damaged"), ("gone", "no answer"), ("bug", "a bug")])
def test_source_that_fails_is_an_error_and_never_wrong_bytes(mount: Mount, how: str, says: str) -> None:
    size = 64 * MIB
    at = mount({"file": (size, MIB)}, window_bytes=8 * MIB)
    want = expected("file", size)
    with open(at.path("file"), "rb", buffering=0) as file:
        assert file.read(2 * MIB) == want[: 2 * MIB]
        at.fault("fail", how)
        got = bytearray()
        with pytest.raises(OSError) as caught:
            while True:
                data = file.read(2 * MIB)
                assert data, "the end was reached"
                got += data
        assert caught.value.errno == errno.EIO
        assert got == want[2 * MIB : 2 * MIB + len(got)]
        at.heal("fail")
        file.seek(0)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        whole = b"".join(iter(lambda: file.read(4 * MIB), b""))
    assert whole == want, "what failed is read again"
    assert any("file" in line and says in line for line in at.log), at.log
    assert len(at.log) < 20


def test_store_that_hangs_does_not_keep_others_waiting(mount: Mount) -> None:
    at = mount({"slow": 8 * MIB, "fast": MIB})
    assert at.read("fast") == expected("fast", MIB)
    at.fault("hang")
    reader = threading.Thread(target=lambda: at.read("slow"))
    reader.start()
    try:
        assert at.read("fast") == expected("fast", MIB)
        assert os.stat(at.path("slow")).st_size == 8 * MIB
    finally:
        at.heal("hang")
        reader.join()


def test_memory_stays_within_its_bound(mount: Mount) -> None:
    at = mount({"file": (160 * MIB, 4 * MIB)}, window_bytes=16 * MIB)
    pid = at.program.pid

    def rss() -> int:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

    before = rss()
    with open(at.path("file"), "rb", buffering=0) as file:
        while file.read(8 * MIB):
            # Beside it each thread of libfuse has buffers of a MiB.
            assert rss() - before < 80 * MIB
