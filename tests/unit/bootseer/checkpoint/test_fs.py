"""The fsspec protocol `stripe`: reads as files are read, ranges at once, and writes that are versions."""

from __future__ import annotations

import io
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.checkpoint import fs as stripe_fs
from bootseer.checkpoint import fs_file, load_file
from bootseer.checkpoint import open as open_checkpoint
from bootseer.checkpoint.fs import StripeFileSystem
from bootseer.checkpoint.fs_file import CheckpointFile
from bootseer.checkpoint.versions import plain as plain_versions
from bootseer.checkpoint.versions.pinned import Pinned
from bootseer.errors import ConfigError, DigestMismatch, SourceChanged, StorageError
from bootseer.storage.protocol import Store
from tests.unit.bootseer.checkpoint.sources import flip, noise, put, stripe

fsspec.register_implementation("stripe", StripeFileSystem, clobber=True)
DATA = noise(3_000_000)


@pytest.fixture
def url(tmp_path: Path) -> str:
    stripe(str(tmp_path), {"model.bin": DATA, "text.csv": b"a,b\n1,2\n3,4\n", "folder/x": b"xx"}, unit_bytes=65536)
    return str(tmp_path)


@pytest.fixture
def fs() -> StripeFileSystem:
    return StripeFileSystem(skip_instance_cache=True)


def test_chained_and_plain_urls(url: str) -> None:
    for name in (
        f"stripe::file://{url}/model.bin",
        f"stripe://{url}/model.bin",
        f"stripe://file://{url}/model.bin",
    ):
        with fsspec.open(name, "rb") as file:
            assert file.read() == DATA
    with fsspec.open(f"stripe::file://{url}/text.csv", "rt") as file:
        assert file.read() == "a,b\n1,2\n3,4\n"
    system, path = fsspec.url_to_fs(f"stripe::file://{url}")
    assert sorted(os.path.basename(each) for each in system.ls(path, detail=False)) == [
        "folder",
        "model.bin",
        "text.csv",
    ]
    assert sorted(os.path.relpath(each, path) for each in system.find(path)) == [
        "folder/x",
        "model.bin",
        "text.csv",
    ]


@pytest.mark.parametrize(
    ("protocol", "options", "path", "wanted"),
    [
        (None, {}, "hdfs://nn/a/b", "hdfs://nn/a/b"),
        (None, {}, "/data/x", "/data/x"),
        ("file", {}, "/data/x", "/data/x"),
        ("hdfs", {"host": "nn", "port": 8020}, "/a/b", "hdfs://nn:8020/a/b"),
        ("hdfs", {"host": "nameservice"}, "/a/b", "hdfs://nameservice/a/b"),
        ("hdfs", {}, "/a/b", "hdfs:///a/b"),
        ("s3", {}, "bucket/key", "s3://bucket/key"),
        ("https", {}, "https://host/x", "https://host/x"),
        ("memory", {}, "/x", "memory:///x"),
    ],
)
def test_which_url_a_path_means(protocol: str | None, options: dict[str, Any], path: str, wanted: str) -> None:
    system = StripeFileSystem(target_protocol=protocol, target_options=options, skip_instance_cache=True)
    assert system.url_of(path) == wanted
    assert system.url_of(f"stripe://{path}") == wanted


def test_options_that_would_be_lost_are_refused() -> None:
    with pytest.raises(ConfigError, match="secret"):
        StripeFileSystem(target_protocol="s3", target_options={"secret": "x"}, skip_instance_cache=True)


def test_looking_around(url: str, fs: StripeFileSystem) -> None:
    assert fs.info(f"{url}/model.bin")["size"] == len(DATA)
    assert fs.info(f"{url}/folder")["type"] == "directory"
    assert fs.isfile(f"{url}/folder/x")
    assert fs.isdir(f"{url}/folder")
    assert fs.isdir(url)
    assert not fs.exists(f"{url}/none")
    assert fs.size(f"{url}/folder/x") == 2
    assert [each["name"] for each in fs.ls(f"{url}/folder")] == [f"{url}/folder/x"]
    with pytest.raises(FileNotFoundError):
        fs.info(f"{url}/none")
    with pytest.raises(IsADirectoryError):
        fs.cat_file(f"{url}/folder")


def test_cat(url: str, fs: StripeFileSystem) -> None:
    path = f"{url}/model.bin"
    assert fs.cat_file(path) == DATA
    for start, end in ((0, 5), (-7, None), (100, -100), (None, 3), (5, 3), (len(DATA) - 1, len(DATA) + 100)):
        assert fs.cat_file(path, start, end) == DATA[start:end]
    assert fs.cat([path, f"{url}/folder/x"]) == {path: DATA, f"{url}/folder/x": b"xx"}


@settings(max_examples=40, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(-100, 9000), st.integers(-100, 9000)), max_size=8),
    max_gap=st.one_of(st.none(), st.integers(0, 3000)),
)
def test_cat_ranges(ranges: list[tuple[int, int]], max_gap: int | None) -> None:
    data = {"a": noise(8000), "b": noise(5000, 2)}
    if not stripe_url_made:
        stripe("memory://cat-ranges", data)
        stripe_url_made.append(True)
    system = StripeFileSystem()
    names = ["ab"[number % 2] for number in range(len(ranges))]
    found = system.cat_ranges(
        [f"memory://cat-ranges/{name}" for name in names],
        [start for start, _ in ranges],
        [end for _, end in ranges],
        max_gap=max_gap,
        on_error="raise",
    )
    assert found == [data[name][start:end] for name, (start, end) in zip(names, ranges, strict=True)]


stripe_url_made: list[bool] = []


def test_cat_ranges_joins_neighbours_and_tells_which_failed(url: str, fs: StripeFileSystem) -> None:
    path = f"{url}/model.bin"
    asked: list[int] = []
    found, _ = fs._find(path)
    source = found.source
    read = source.read
    source.read = lambda requests: (asked.append(len(requests)), read(requests))[1]  # type: ignore[method-assign]
    ranges = ([path] * 3, [0, 100, 5000], [50, 150, 5050])
    assert fs.cat_ranges(*ranges) == [DATA[0:50], DATA[100:150], DATA[5000:5050]]
    assert fs.cat_ranges(*ranges, max_gap=60) == [DATA[0:50], DATA[100:150], DATA[5000:5050]]
    assert asked == [3, 2]
    answers = fs.cat_ranges([path, f"{url}/none", path], 0, 5)
    assert answers[0] == answers[2] == DATA[:5]
    assert isinstance(answers[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([path, f"{url}/none"], 0, 5, on_error="raise")
    for bad in (([path], [0, 1], 5), ([path], 0, [1, 2])):
        with pytest.raises(ValueError, match="as many"):
            fs.cat_ranges(*bad)
    with pytest.raises(TypeError):
        fs.cat_ranges(path, 0, 5)


def test_cat_ranges_over_damage(tmp_path: Path, fs: StripeFileSystem) -> None:
    pinned = stripe(str(tmp_path), {"m": noise(5 * 4096)}, stripes=1)
    flip(str(tmp_path), pinned.files[0].stripes[0], 4096 + 5)
    answers = fs.cat_ranges(
        [f"{tmp_path}/m"] * 5, [n * 4096 for n in range(5)], [n * 4096 + 4096 for n in range(5)]
    )
    assert [isinstance(each, DigestMismatch) for each in answers] == [False, True, False, False, False]


# ---- files ----


@pytest.fixture(params=["small windows", "as shipped"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small windows":
        monkeypatch.setattr(fs_file, "BLOCK_BYTES", 1000)
        monkeypatch.setattr(fs_file, "WINDOW_BYTES", 65536)
        monkeypatch.setattr(fs_file, "STREAK_BYTES", 4000)
        monkeypatch.setattr(fs_file, "SKIP_BYTES", 500)
        monkeypatch.setattr(fs_file, "DIRECT_BYTES", 400_000)


@pytest.mark.parametrize("seed", range(6))
def test_a_file_reads_like_a_file(url: str, fs: StripeFileSystem, windows: None, seed: int) -> None:
    chance = random.Random(seed)
    plain = io.BytesIO(DATA)
    with fs.open(f"{url}/model.bin") as file:
        assert isinstance(file, CheckpointFile)
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        for _ in range(150):
            match chance.randrange(6):
                case 0:
                    at = chance.randrange(len(DATA) + 100)
                    assert file.seek(at) == plain.seek(at)
                case 1:
                    at = -chance.randrange(len(DATA))
                    assert file.seek(at, io.SEEK_END) == plain.seek(at, io.SEEK_END)
                case 2:
                    at = chance.randrange(600)
                    assert file.seek(at, io.SEEK_CUR) == plain.seek(at, io.SEEK_CUR)
                case 3:
                    one, other = bytearray(chance.randrange(500_000)), bytearray()
                    count = file.readinto(one)
                    other = bytearray(plain.read(len(one)))
                    assert one[:count] == other
                case _:
                    count = chance.choice([1, 10, 999, 5000, 70_000])
                    assert file.read(count) == plain.read(count)
            assert file.tell() == plain.tell()
        buffer = bytearray(1000)
        assert file.readinto_at(5000, buffer) == 1000
        assert buffer == DATA[5000:6000]
        assert file.tell() == plain.tell()
        assert file.readinto_at(len(DATA) - 10, buffer) == 10
        with pytest.raises(OSError, match="before the start"):
            file.seek(-5)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_in_order_it_is_read_once(url: str, windows: None) -> None:
    system = StripeFileSystem(skip_instance_cache=True)
    with system.open(f"{url}/model.bin") as file:
        parts = []
        while part := file.read(8192):
            parts.append(part)
        assert b"".join(parts) == DATA
        read = file._source.statistics()["read_bytes"]
        assert read <= len(DATA) + (2 << 20)


def test_buffered_text_and_archives(url: str, fs: StripeFileSystem) -> None:
    with io.BufferedReader(fs.open(f"{url}/model.bin"), 5000) as file:
        assert file.read(10) == DATA[:10]
        file.seek(-10, io.SEEK_END)
        assert file.read() == DATA[-10:]
    with fs.open(f"{url}/text.csv", "r") as file:
        assert file.readline() == "a,b\n"


def test_torch_loads_through_it(tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 400), "b": torch.arange(10)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    stripe(str(tmp_path), {"m.pt": buffer.getvalue()}, unit_bytes=65536)
    with fsspec.open(f"stripe::file://{tmp_path}/m.pt") as file:
        found = torch.load(file, weights_only=True)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_damage_is_an_error_in_every_way_of_reading(tmp_path: Path, fs: StripeFileSystem) -> None:
    pinned = stripe(str(tmp_path), {"m": DATA}, stripes=1, unit_bytes=1 << 20)
    flip(str(tmp_path), pinned.files[0].stripes[0], 1_500_000)
    with fs.open(f"{tmp_path}/m") as file, pytest.raises(DigestMismatch):
        while file.read(300_000):
            pass
    with fs.open(f"{tmp_path}/m") as file, pytest.raises(DigestMismatch):
        file.read()


def test_threads_and_forked_children(url: str) -> None:
    system = StripeFileSystem(skip_instance_cache=True)
    file = system.open(f"{url}/model.bin")
    assert file.read(2_000_000) == DATA[:2_000_000]
    child = os.fork()
    if not child:
        status = 1
        try:
            right = file.read(500_000) == DATA[2_000_000:2_500_000] and system.cat_file(f"{url}/folder/x") == b"xx"
            status = 0 if right else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    wrong: list[int] = []

    def work(start: int) -> None:
        buffer = bytearray(50_000)
        if file.readinto_at(start, buffer) != 50_000 or buffer != DATA[start : start + 50_000]:
            wrong.append(start)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 500_000, 50_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert not wrong


def test_an_instance_can_be_sent_to_another_process(url: str) -> None:
    system = pickle.loads(pickle.dumps(StripeFileSystem(verify="full")))
    assert system.cat_file(f"{url}/folder/x") == b"xx"


# ---- writing ----


@pytest.mark.parametrize("base", ["memory://fs-write", "disk"])
def test_what_is_written_is_a_version(tmp_path: Path, base: str, fs: StripeFileSystem) -> None:
    root = str(tmp_path) if base == "disk" else f"{base}-{tmp_path.name}"
    with fs.open(f"{root}/m.bin", "wb") as file:
        for start in range(0, len(DATA), 700_001):
            file.write(DATA[start : start + 700_001])
        assert file.tell() == len(DATA)
        with pytest.raises(FileNotFoundError):
            fs.info(f"{root}/m.bin")  # not before it is closed
    fs.invalidate_cache()
    assert fs.cat_file(f"{root}/m.bin") == DATA
    fs.pipe({f"{root}/a": b"1", f"{root}/b": b"22"})
    with open_checkpoint(root) as checkpoint:
        assert sorted(checkpoint.files) == ["a", "b"]
    fs.pipe_file(f"{root}/c", b"333")
    assert fs.cat_file(f"{root}/c") == b"333"
    (tmp_path / "local" / "deep").mkdir(parents=True)
    (tmp_path / "local" / "x").write_bytes(b"x")
    (tmp_path / "local" / "deep" / "y").write_bytes(DATA)
    fs.put(str(tmp_path / "local"), f"{root}/tree", recursive=True)
    with open_checkpoint(f"{root}/tree") as checkpoint:
        assert sorted(checkpoint.files) == ["deep/y", "x"]
    fs.put_file(str(tmp_path / "local" / "x"), f"{root}/one/x")
    assert fs.cat_file(f"{root}/one/x") == b"x"
    fs.makedirs(f"{root}/any", exist_ok=True)
    with fs.open(f"{root}/t/t.txt", "w") as file:
        file.write("text")
    assert fs.cat_file(f"{root}/t/t.txt") == b"text"


def test_torch_saves_through_it(tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 400)}
    with fsspec.open(f"stripe::file://{tmp_path}/ck/m.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"stripe::file://{tmp_path}/ck/m.pt") as file:
        assert torch.equal(torch.load(file, weights_only=True)["a"], state["a"])
    from safetensors.torch import save

    StripeFileSystem().pipe_file(f"{tmp_path}/st/m.safetensors", save(state))
    assert torch.equal(load_file(tmp_path / "st")["a"], state["a"])


def test_a_failed_write_is_never_visible(tmp_path: Path, fs: StripeFileSystem) -> None:
    with pytest.raises(ZeroDivisionError), fs.open(f"{tmp_path}/ck/m", "wb") as file:
        file.write(DATA)
        raise ZeroDivisionError
    with pytest.raises(FileNotFoundError):
        fs.info(f"{tmp_path}/ck/m")
    file = fs.open(f"{tmp_path}/ck/m", "wb")
    file.write(b"part")
    del file  # never closed
    assert "checkpoint-write" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(FileNotFoundError):
        fs.info(f"{tmp_path}/ck/m")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError), fs.open(f"{tmp_path}/file/m", "wb") as file:
        for _ in range(20):
            file.write(DATA)
    for mode in ("ab", "r+b"):
        with pytest.raises(NotImplementedError):
            fs.open(f"{tmp_path}/ck/m", mode)


def test_files_of_directories_above_are_none_of_its_business(
    tmp_path: Path, fs: StripeFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write and remove what lies above a path in which nothing is."""

    async def somebody_removes_one(store: Store, directory: str, version: str, names: object) -> Pinned:
        raise SourceChanged(f"{directory}: a file was removed while it was inspected")

    monkeypatch.setattr(plain_versions, "_pin_files", somebody_removes_one)
    put(str(tmp_path), {"log": b"x", "plain/model.bin": DATA, "steps/step-3/model.bin": DATA})
    stripe(f"{tmp_path}/striped", {"inner/m": b"m"})
    for name in ("ck/m", "plain/a/b", "steps/a", "steps/step-3/a"):
        with pytest.raises(FileNotFoundError):
            fs.info(f"{tmp_path}/{name}")
    assert fs.cat_file(f"{tmp_path}/striped/inner/m") == b"m"


def test_open_files_keep_their_version(
    tmp_path: Path, fs: StripeFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripe(str(tmp_path), {"m": b"old"})
    with fs.open(f"{tmp_path}/m") as file:
        stripe(str(tmp_path), {"m": b"newer"})
        assert fs.cat_file(f"{tmp_path}/m") == b"old"  # known for a while
        fs.invalidate_cache()
        assert fs.cat_file(f"{tmp_path}/m") == b"newer"
        assert file.read() == b"old"
    stripe(str(tmp_path), {"m": b"newest"})
    monkeypatch.setattr(stripe_fs, "FRESH_S", 0.0)
    assert fs.cat_file(f"{tmp_path}/m") == b"newest"


def test_plain_files_too(tmp_path: Path, fs: StripeFileSystem) -> None:
    put(f"memory://{tmp_path.name}", {"folder/plain": DATA})
    assert fs.cat_file(f"memory://{tmp_path.name}/folder/plain", 5, 500) == DATA[5:500]
    (tmp_path / "x").write_bytes(DATA)
    (tmp_path / "y").write_bytes(b"y")
    assert fs.cat([f"{tmp_path}/x", f"{tmp_path}/y"]) == {f"{tmp_path}/x": DATA, f"{tmp_path}/y": b"y"}
