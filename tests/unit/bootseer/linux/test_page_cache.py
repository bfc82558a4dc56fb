"""What the kernel says of its cache, and where files lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.linux import page_cache
from bootseer.linux.page_cache import cached_share, is_remote


@pytest.fixture
def fd(tmp_path: Path):  # type: ignore[no-untyped-def]
    path = tmp_path / "file.bin"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("has_cachestat", [True, False])
def test_cached_share(fd: int, monkeypatch: pytest.MonkeyPatch, has_cachestat: bool) -> None:
    if not has_cachestat:
        monkeypatch.setattr(page_cache, "_has_cachestat", False)
        monkeypatch.setattr(page_cache, "_AT_ONCE_S", 1.0)  # however busy the machine is
    os.pread(fd, 1 << 20, 0)
    assert cached_share(fd, 0, 1 << 20) == 1.0
    assert cached_share(fd, 5000, 100) == 1.0
    assert cached_share(fd, 0, 0) == 1.0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if os.statvfs(fd).f_bsize and cached_share(fd, 0, 1 << 20) == 1.0:
        pytest.skip("this file system keeps all in memory")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.undo()
    if not has_cachestat:
        monkeypatch.setattr(page_cache, "_has_cachestat", False)
    assert cached_share(fd, 0, 1 << 20) < 0.5


def test_half_a_file(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    if not page_cache._has_cachestat or cached_share(fd, 0, 1 << 20) > 0:
        pytest.skip("no cachestat, or a file system that keeps all in memory")
    os.pread(fd, 1 << 19, 0)
    assert cached_share(fd, 0, 1 << 20) == pytest.approx(0.5, abs=0.05)
    assert cached_share(fd, 1 << 19, 1 << 19) < 0.1


def test_an_older_kernel(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "_CACHESTAT", 1_000_000)
    monkeypatch.setattr(page_cache, "_has_cachestat", True)
    monkeypatch.setattr(page_cache, "_AT_ONCE_S", 1.0)
    os.pread(fd, 1 << 20, 0)
    assert cached_share(fd, 0, 1 << 20) == 1.0
    assert not page_cache._has_cachestat, "it is not asked again"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *[(kind, False) for kind in ("ext4", "tmpfs", "xfs", "overlay", None)],
        *[(kind, True) for kind in ("nfs4", "fuse.sshfs", "lustre", "ceph", "9p", "virtiofs")],
    ],
)
def test_is_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, expected: bool) -> None:
    monkeypatch.setattr(page_cache, "_file_system", lambda device: kind)
    assert is_remote(str(tmp_path)) is expected
    assert is_remote(str(tmp_path / "not" / "there")) is expected


def test_file_systems_are_found() -> None:
    assert page_cache._file_system(os.stat("/proc").st_dev) == "proc"
    assert page_cache._file_system(0xFFFFF) is None
