"""DirectSource and LocalSource: every range is the file's; damage and change are found; forked children read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.checkpoint.io import direct
from bootseer.checkpoint.io.direct import FULL, NONE, SAMPLED, UNITS, DirectSource
from bootseer.checkpoint.io.local_source import LocalSource
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import open_source
from bootseer.errors import ConfigError, DigestMismatch, IntegrityError, NotFound, SourceChanged, Truncated
from tests.unit.bootseer.checkpoint.sources import UNIT_BYTES, flip, noise, put, stripe

DATA = noise(10 * UNIT_BYTES + 777)


def read(source: Source, path: str, offset: int, length: int) -> bytes:
    data = bytearray(length)
    source.read([Request(path, offset, memoryview(data))])
    return bytes(data)


@pytest.fixture(scope="module", params=[1, 3, 8])
def striped(request: pytest.FixtureRequest) -> str:
    url = f"memory://direct-{request.param}"
    stripe(url, {"a/model": DATA, "empty": b"", "small": b"x" * 5}, stripes=request.param)
    return url


@pytest.mark.parametrize("verify", [UNITS, SAMPLED, FULL, NONE])
@settings(max_examples=25)
@given(ranges=st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))), max_size=5))
def test_any_ranges(striped: str, verify: str, ranges: list[tuple[int, int]]) -> None:
    with open_source(striped, verify=verify) as opened:
        targets = [bytearray(abs(end - start)) for start, end in ranges]
        opened.source.read(
            [Request("a/model", min(span), memoryview(data)) for span, data in zip(ranges, targets, strict=True)]
        )
        for (start, end), data in zip(ranges, targets, strict=True):
            assert data == DATA[min(start, end) : max(start, end)]


def test_names_sizes_and_counts(striped: str) -> None:
    with open_source(striped) as opened:
        source = opened.source
        assert isinstance(source, DirectSource)
        assert {name: file.size for name, file in source.files.items()} == {
            "a/model": len(DATA),
            "empty": 0,
            "small": 5,
        }
        assert source.version
        assert len(source.digest) == 64
        assert read(source, "small", 0, 5) == b"xxxxx"
        assert read(source, "empty", 0, 0) == b""
        assert read(source, "a/model", 0, len(DATA)) == DATA
        counts = source.statistics()
        assert counts["read_bytes"] == len(DATA) + 5
        assert counts["checked_units"] == 11 + 1
    assert source.statistics()["read_bytes"] == len(DATA) + 5


def test_refuses_what_is_not_there(striped: str) -> None:
    with open_source(striped) as opened:
        with pytest.raises(NotFound, match="nothing"):
            read(opened.source, "nothing", 0, 1)
        for offset, length in ((0, len(DATA) + 1), (len(DATA), 1), (-1, 1)):
            with pytest.raises(Truncated, match="a/model"):
                read(opened.source, "a/model", offset, length)
    with pytest.raises(ConfigError, match="verify='all'"):
        open_source(striped, verify="all")


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_flipped_bit_is_found(tmp_path: Path, stripes: int) -> None:
    pinned = stripe(str(tmp_path), {"model": DATA}, stripes=stripes)
    file = pinned.files[0]
    for number, at in enumerate(range(5, len(DATA), 2500)):
        piece = next(file.layout.pieces(at, 1))
        name = file.stripes[piece.stripe]
        flip(str(tmp_path), name, piece.stripe_offset)
        unit = at // UNIT_BYTES
        whole = (unit * UNIT_BYTES, file.layout.unit_length(unit))
        for verify in (UNITS, FULL):
            with open_source(tmp_path, verify=verify) as opened:
                with pytest.raises(DigestMismatch, match=f"unit {unit} .*{os.path.basename(name)}"):
                    read(opened.source, "model", *whole)
                if number % 2 and stripes == 1:
                    with pytest.raises(DigestMismatch):
                        opened.source.map("model", *whole)
        with open_source(tmp_path, verify=FULL) as opened, pytest.raises(DigestMismatch):
            read(opened.source, "model", at, 1)
        with open_source(tmp_path, verify=NONE) as opened:
            assert read(opened.source, "model", at, 1) != DATA[at : at + 1]
        flip(str(tmp_path), name, piece.stripe_offset)
    with open_source(tmp_path, verify=FULL) as opened:
        assert read(opened.source, "model", 0, len(DATA)) == DATA


def test_sampling_looks_at_one_in_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://sampled"
    data = noise(64 * UNIT_BYTES)
    stripe(url, {"model": data}, stripes=2)
    with open_source(url, verify=SAMPLED) as opened:
        assert read(opened.source, "model", 0, len(data)) == data
        assert opened.source.statistics()["checked_units"] == 64 // direct.SAMPLE_EVERY


def test_maps_a_local_stripe_and_keeps_writes_to_itself(tmp_path: Path) -> None:
    stripe(str(tmp_path), {"model": DATA}, stripes=1)
    with open_source(tmp_path) as opened:
        view = opened.source.map("model", 100, len(DATA) - 100)
        assert view is not None
        assert view == DATA[100:]
        view[:5] = b"\0\0\0\0\0"
        assert opened.source.statistics()["checked_units"] == 10  # not the first, which was asked for in part
    assert view[:5] == b"\0\0\0\0\0"  # lives on
    with open_source(tmp_path) as opened:
        assert read(opened.source, "model", 100, 5) == DATA[100:105]


def test_plain_files_of_a_store() -> None:
    url = "memory://plain"
    put(url, {"one.bin": DATA, "folder/two.bin": b"22"})
    with open_source(f"{url}/one.bin") as opened:
        assert list(opened.source.files) == ["one.bin"]
        assert not opened.source.version
        assert read(opened.source, "one.bin", 5, 1000) == DATA[5:1005]
        put(url, {"one.bin": DATA[::-1]})
        with pytest.raises(SourceChanged):
            read(opened.source, "one.bin", 5, 1000)
    with open_source(url) as opened:
        assert sorted(opened.source.files) == ["folder/two.bin", "one.bin"]
        assert read(opened.source, "folder/two.bin", 0, 2) == b"22"


def test_a_file_of_a_striped_checkpoint_by_its_path(tmp_path: Path) -> None:
    for url in ("memory://inner/run", str(tmp_path)):
        stripe(url, {"deep/model": DATA, "deep/more": b"m"})
        with open_source(f"{url}/deep/model") as opened:
            assert opened.path == "deep/model"
            assert read(opened.source, opened.path, 0, len(DATA)) == DATA
        with open_source(f"{url}/deep") as opened:
            assert opened.inside("more") == "deep/more"
        with pytest.raises(NotFound, match="deep/none"):
            open_source(f"{url}/deep/none")
    with pytest.raises(NotFound):
        open_source(tmp_path / "elsewhere" / "x")


def test_the_newest_version_or_a_named_one(tmp_path: Path) -> None:
    first = stripe(str(tmp_path), {"model": b"old"})
    second = stripe(str(tmp_path), {"model": b"new"})
    assert first.version < second.version
    with open_source(tmp_path) as opened:
        assert read(opened.source, "model", 0, 3) == b"new"
    with open_source(tmp_path, version=first.version) as opened:
        assert opened.source.version == first.version
        assert read(opened.source, "model", 0, 3) == b"old"
    with pytest.raises(ConfigError, match="is not a version"):
        open_source(tmp_path, version="../x")


# ---- local files ---------------------------------------------------------------------------------------------


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(DATA * 300)
    return path


def test_local_reads_and_maps(big: Path) -> None:
    data = big.read_bytes()
    with open_source(big) as opened:
        source = opened.source
        assert isinstance(source, LocalSource)
        for offset, length in ((0, len(data)), (1, 9_000_000), (4096, 4096), (len(data) - 3, 3), (7, 0)):
            assert read(source, "big", offset, length) == data[offset : offset + length]
            view = source.map("big", offset, length)
            assert view is not None
            assert view == data[offset : offset + length]
        with pytest.raises(Truncated):
            source.map("big", 1, len(data))
        with pytest.raises(NotFound):
            source.map("none", 0, 1)
    counts = source.statistics()
    assert counts["read_bytes"] >= len(data)
    assert counts["mapped_bytes"] >= len(data)


def test_local_mapping_of_a_cold_file(big: Path) -> None:
    data = big.read_bytes()
    fd = os.open(big, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with open_source(big) as opened:
        view = opened.source.map("big", 10, len(data) - 10)
        assert view is not None
        assert view == data[10:]


def test_local_file_that_changes(big: Path) -> None:
    with open_source(f"file://{big}") as opened:
        with big.open("r+b") as file:
            file.write(b"other")
        os.utime(big, ns=(1, 1))
        with pytest.raises(SourceChanged, match="big"):
            read(opened.source, "big", 0, 10)
        with pytest.raises(SourceChanged, match="big"):
            opened.source.map("big", 0, 10)


def test_local_directory_has_the_digest_that_the_job_pins(tmp_path: Path) -> None:
    from bootseer import aio
    from bootseer.checkpoint.versions.resolve import resolve
    from bootseer.storage import open_at, open_store

    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x.bin").write_bytes(b"2")
    with open_source(tmp_path) as opened:
        assert isinstance(opened.source, LocalSource)
        assert sorted(opened.source.files) == ["model.safetensors", "more/x.bin"]
        assert opened.source.digest == aio.run_sync(resolve(open_store(str(tmp_path)))).digest
    single = tmp_path / "more" / "x.bin"
    with open_source(single) as opened:
        assert opened.source.digest == aio.run_sync(resolve(*open_at(str(single)))).digest


# ---- processes and threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stripes", [1, 3])
def test_forked_children_and_threads_read(tmp_path: Path, stripes: int) -> None:
    stripe(str(tmp_path), {"model": DATA}, stripes=stripes)
    with open_source(tmp_path) as opened:
        source = opened.source
        assert read(source, "model", 0, len(DATA)) == DATA
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if read(source, "model", 3, 5000) == DATA[3:5003] else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        wrong: list[int] = []

        def work(start: int) -> None:
            if read(source, "model", start, 9000) != DATA[start : start + 9000]:
                wrong.append(start)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 30000, 3000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_job_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pinned = stripe(str(tmp_path), {"model": b"old"})
    for name in ("BOOTSEER_CHECKPOINT", "BOOTSEER_CHECKPOINT_URL", "BOOTSEER_ARENA"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="--load-checkpoint"):
        open_source()
    monkeypatch.setenv("BOOTSEER_CHECKPOINT_URL", str(tmp_path))
    monkeypatch.setenv("BOOTSEER_CHECKPOINT", "")
    with pytest.raises(NotFound, match="no complete checkpoint yet"):
        open_source()
    monkeypatch.setenv("BOOTSEER_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("BOOTSEER_CHECKPOINT_VERSION", pinned.version)
    monkeypatch.setenv("BOOTSEER_CHECKPOINT_DIGEST", pinned.digest)
    stripe(str(tmp_path), {"model": b"new"})
    for url in (None, tmp_path, f"{tmp_path}/"):
        with open_source(url) as opened:  # what the job has pinned, not what is newest
            assert read(opened.source, "model", 0, 3) == b"old"
    with open_source(tmp_path / "model") as opened:
        assert opened.path == "model"
        assert read(opened.source, "model", 0, 3) == b"old"
    monkeypatch.setenv("BOOTSEER_CHECKPOINT_DIGEST", "0" * 64)
    with pytest.raises(IntegrityError):
        open_source()


@pytest.mark.parametrize("verify", [UNITS, FULL])
def test_a_flipped_bit_is_found_by_reads_that_cut_units(verify: str) -> None:
    """A file that is read piece by piece is as well checked as one that is read at once."""
    url = f"memory://cut-units-{verify}"
    pinned = stripe(url, {"model": DATA}, stripes=3)
    pieces = [(start, min(5000, len(DATA) - start)) for start in range(0, len(DATA), 5000)]
    with open_source(url, verify=verify) as opened:
        assert b"".join(read(opened.source, "model", *piece) for piece in pieces[::-1])
        assert opened.source.statistics()["checked_units"] >= 11
    for at in range(17, len(DATA), 4001):
        piece = next(pinned.files[0].layout.pieces(at, 1))
        flip(url, pinned.files[0].stripes[piece.stripe], piece.stripe_offset)
        with open_source(url, verify=verify) as opened, pytest.raises(DigestMismatch):
            for each in pieces:
                read(opened.source, "model", *each)
        flip(url, pinned.files[0].stripes[piece.stripe], piece.stripe_offset)


def test_without_the_arena_it_is_read_directly_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pinned = stripe(str(tmp_path), {"model": DATA})
    for name, value in {
        "BOOTSEER_CHECKPOINT": "/proc/self/fd/none",
        "BOOTSEER_CHECKPOINT_URL": str(tmp_path),
        "BOOTSEER_CHECKPOINT_VERSION": pinned.version,
        "BOOTSEER_CHECKPOINT_DIGEST": pinned.digest,
        "BOOTSEER_ARENA": str(tmp_path / "nobody"),
    }.items():
        monkeypatch.setenv(name, value)
    with open_source() as opened:
        assert read(opened.source, "model", 0, len(DATA)) == DATA
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "not from this node's arena" in told
