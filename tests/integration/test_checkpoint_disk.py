"""What this node's disk keeps of a checkpoint that was loaded: read the next time, checked, never relied on."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.checkpoint.disk_copy import FOLDER, DiskCopy
from bootseer.checkpoint.inputs import MemoryInput
from bootseer.checkpoint.writer import Geometry, write_version
from bootseer.storage.local import LocalStore
from bootseer.testing.faulty_http import FaultyHttpServer
from tests import support
from tests.integration.keeper_driver import KeeperProcess, Start, keepers, wait_until
from tests.integration.mounted_trees import need_mounts
from tests.integration.test_load_checkpoint import loaded, reads

UNIT_BYTES = 1 << 20
SIZE = (9 << 20) + 12345  # the last unit is no whole number of blocks
UNITS = 10
ROOM = 1 << 30


class Stored:
    """A checkpoint whose versions are written one after the other, behind a web server that counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.server = FaultyHttpServer({})
        self.data = b""
        self.write(0)

    def write(self, seed: int) -> None:
        self.data = random.Random(seed).randbytes(SIZE)
        store = LocalStore(str(self._folder))
        made = write_version(
            store, "ckpt", [("model.bin", MemoryInput([self.data]))], geometry=Geometry(UNIT_BYTES, 2)
        )
        aio.run_sync(made)
        aio.close()
        for path in self._folder.rglob("*"):
            if path.is_file():
                self.server.files[path.relative_to(self._folder).as_posix()] = path.read_bytes()

    @property
    def url(self) -> str:
        return f"{self.server.url}/ckpt"

    @property
    def sent_bytes(self) -> int:
        """Of stripes."""
        return sum(count for name, count in self.server.served_bytes.items() if ".s0" in name)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path / "stored")
    yield made
    made.server.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Start]:
    yield from keepers(tmp_path)


def copies(folder: Path) -> list[Path]:
    above = folder / "cache" / FOLDER
    return sorted(above.iterdir()) if above.is_dir() else []


def await_copies(folder: Path, count: int = 1) -> list[Path]:
    """Until so many versions are there, whole."""

    def are_there() -> bool:
        whole = [path for path in copies(folder) if (path / "units").read_bytes() == b"\1" * UNITS]
        return len(whole) == count

    wait_until(are_there, "what was loaded to be on the disk")
    return copies(folder)


def load(keeper: KeeperProcess, stored: Stored) -> dict[str, Any]:
    """The answer; what was loaded is right."""
    answer = keeper.load()
    assert answer["did"] == "ready", keeper.heard
    assert Path(answer["path"], "model.bin").read_bytes() == stored.data
    return answer


def said(keeper: KeeperProcess) -> list[str]:
    return [each["text"] for each in keeper.heard if each["did"] == "said"]


def load_once(start: Start, stored: Stored, folder: Path, count: int = 1) -> None:
    """By a keeper that is gone then; its version is on the disk."""
    first = start(stored.url, disk_bytes=ROOM)
    assert load(first, stored)["disk_bytes"] == 0
    await_copies(folder, count)
    first.order("end")
    first.process.wait()


def test_the_next_start_reads_the_disk(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    load_once(keeper, stored, tmp_path)
    before = stored.sent_bytes
    assert load(keeper(stored.url, disk_bytes=ROOM), stored)["disk_bytes"] == SIZE
    assert stored.sent_bytes == before
    [kept] = copies(tmp_path)
    assert {path.name for path in kept.iterdir()} == {"0", "units", "used", "written"}
    assert (kept / "0").read_bytes() == stored.data
    assert (os.stat(kept).st_mode & 0o777, os.stat(kept / "0").st_mode & 0o777) == (0o700, 0o600)


def test_without_the_flag_nothing_is_kept(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    load(keeper(stored.url), stored)
    assert copies(tmp_path) == []


@pytest.mark.parametrize("damage", ["flipped", "cut off", "not marked", "all marked"])
def test_what_is_damaged_is_read_from_the_store(
    damage: str, keeper: Start, stored: Stored, tmp_path: Path
) -> None:
    load_once(keeper, stored, tmp_path)
    [kept] = copies(tmp_path)
    with open(kept / "0", "r+b") as file, open(kept / "units", "r+b") as units:
        if damage == "flipped":
            file.seek(3 * UNIT_BYTES + 77)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        elif damage == "cut off":
            file.truncate(SIZE - 5)
        elif damage == "not marked":
            units.seek(4)
            units.write(b"\0")
        else:
            file.truncate(0)
            file.truncate(SIZE)
    before = stored.sent_bytes
    found = load(keeper(stored.url, disk_bytes=ROOM), stored)
    assert stored.sent_bytes - before >= (SIZE - 9 * UNIT_BYTES if damage == "cut off" else UNIT_BYTES)
    assert found["disk_bytes"] < SIZE
    wait_until(lambda: (kept / "0").read_bytes() == stored.data, "the copy to be right again")
    await_copies(tmp_path)


def test_older_versions_make_room(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    load_once(keeper, stored, tmp_path)
    [old] = copies(tmp_path)
    stored.write(1)
    load_once(keeper, stored, tmp_path, 2)
    stored.write(2)
    third = keeper(stored.url, disk_bytes=2 * SIZE + (1 << 20))
    load(third, stored)
    assert old not in await_copies(tmp_path, 2)
    assert said(third) == []


def test_a_version_in_use_stays(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    first = keeper(stored.url, disk_bytes=ROOM)
    load(first, stored)
    await_copies(tmp_path)
    stored.write(1)
    second = keeper(stored.url, disk_bytes=SIZE + 1)
    load(second, stored)
    [line] = said(second)
    assert "the checkpoint is not kept on this node's disk" in line
    assert "beside what is in use" in line
    assert len(await_copies(tmp_path)) == 1


def test_two_keepers_of_one_version(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    """One writes; the other reads what is there, and what is not from the store."""
    first, second = keeper(stored.url, disk_bytes=ROOM), keeper(stored.url, disk_bytes=ROOM)
    load(first, stored)
    load(second, stored)
    await_copies(tmp_path)
    assert said(first) == said(second) == []


def test_one_that_is_too_large_is_not_kept(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    small = keeper(stored.url, disk_bytes=SIZE - 1)
    load(small, stored)
    [line] = said(small)
    assert f"it has {SIZE:,} bytes, and {SIZE - 1:,} may be kept" in line


def test_memory_is_given_back_when_the_disk_has_it(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    running = keeper(stored.url, disk_bytes=ROOM)
    load(running, stored)
    running.order("release")

    def is_given_back() -> bool:
        running.order("statistics")
        return bool(running.hear("statistics")["arena_bytes"] == 0)

    wait_until(is_given_back, "the memory to be given back")
    await_copies(tmp_path)


@pytest.mark.system
def test_a_full_disk(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    need_mounts()
    cache = tmp_path / "cache"
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(cache)], check=True)
    try:
        (cache / "other").write_bytes(bytes(18 << 20))
        running = keeper(stored.url, disk_bytes=ROOM)
        load(running, stored)
        assert "has no room" in said(running)[0]
        (cache / "other").write_bytes(b"")
        running.order("end")
        running.process.wait()
        load_once(keeper, stored, tmp_path)  # tmpfs knows no O_DIRECT, or another kind of it
        assert load(keeper(stored.url, disk_bytes=ROOM), stored)["disk_bytes"] == SIZE
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)


def test_a_folder_that_others_may_write_to_is_not_used(keeper: Start, stored: Stored, tmp_path: Path) -> None:
    above = tmp_path / "cache" / FOLDER
    above.mkdir(parents=True)
    above.chmod(0o777)
    running = keeper(stored.url, disk_bytes=ROOM)
    load(running, stored)
    assert "others" in said(running)[0]
    assert list(above.iterdir()) == []


def test_a_disk_that_fails_while_it_is_written(tmp_path: Path) -> None:
    """Nothing more is kept then."""
    from bootseer.checkpoint.direct import StoredFile
    from bootseer.checkpoint.layout import Layout

    file = StoredFile("f", Layout(2 * UNIT_BYTES, UNIT_BYTES, 1), ("s",), (0, 0))
    copy = DiskCopy(str(tmp_path), "d" * 64, [file], ROOM)
    data = memoryview(bytearray(UNIT_BYTES))
    copy.write(0, 0, data)
    for fd in (*copy._fds, *copy._direct):
        if fd >= 0:
            null = os.open("/dev/full", os.O_RDWR)
            os.dup2(null, fd)
            os.close(null)
    with pytest.raises(OSError, match="No space left"):
        copy.write(0, 1, data)
    assert (copy.has(0, 0), copy.has(0, 1), copy.is_writer) == (True, False, False)
    copy.close()


def test_a_job_says_what_came_from_the_disk(bootrun: support.Programs, stored: Stored) -> None:
    folder = Path(bootrun.dir)
    units = f"cache/{FOLDER}/*/units"
    waits = (
        "import glob, time\n"
        f"while [open(path, 'rb').read() for path in glob.glob({units!r})] != [b'\\1' * {UNITS}]:\n"
        "    time.sleep(0.01)  # looks again: a thread of the keeper writes it\n"
    )
    (folder / "reads.py").write_text(reads("/model.bin") + waits)
    words = [
        "--standalone",
        "--load-checkpoint",
        stored.url,
        "--checkpoint-disk",
        "1GiB",
        "--events-dir",
        "events",
    ]
    found = []
    for _ in range(2):
        shutil.rmtree(folder / "events", ignore_errors=True)
        run = bootrun(*words, "reads.py", env={"BOOTSEER_CACHE": os.fspath(folder / "cache")})
        assert run.status == 0, run.stderr
        assert loaded(folder, "read-0")[0] == hashlib.sha256(stored.data).hexdigest()
        [file] = (folder / "events").glob("agent-*.jsonl")
        events = [json.loads(line) for line in file.read_text().splitlines()]
        found += [each["attrs"] for each in events if each["name"] == "checkpoint" and each["kind"] == "end"]
    assert [each.get("disk_bytes") for each in found] == [None, SIZE]


def test_warming_brings_it_to_the_disk(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    environ = {**support.clean_environ(), "BOOTSEER_CACHE": os.fspath(tmp_path / "cache")}
    words = ["warm", "--load-checkpoint", stored.url, "--checkpoint-disk", "1GiB", "--json", "train.py"]

    def warm() -> str:
        argv = [os.path.join(os.path.dirname(sys.executable), "bootseer"), *words]
        ran = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        [found] = [each for each in json.loads(ran.stdout)["stages"] if each["stage"] == "checkpoint"]
        return f"{found['how']} {found['size_bytes']} {found['fetched_bytes']}"

    assert warm() == f"cached {SIZE} {SIZE}"
    await_copies(tmp_path)
    before = stored.sent_bytes
    assert warm() == f"there {SIZE} 0"
    assert stored.sent_bytes == before
