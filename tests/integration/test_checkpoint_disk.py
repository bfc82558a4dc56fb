"""What this node's disk keeps of a checkpoint that was loaded: read the next time, checked, never relied on."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.checkpoint.service.disk_copy import DIRECTORY, DiskCopy
from bootseer.checkpoint.writing.writer import Geometry
from tests import support
from tests.integration.mounted_trees import need_mounts
from tests.integration.served_checkpoint import ServedCheckpoint
from tests.integration.service_driver import ServiceProcess, Start, services, wait_until
from tests.integration.test_load_checkpoint import loaded, reads

UNIT_BYTES = 1 << 20
SIZE = (9 << 20) + 12345  # the last unit is no whole number of blocks
UNITS = 10
ROOM = 1 << 30


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[ServedCheckpoint]:
    made = ServedCheckpoint(tmp_path / "stored", SIZE, Geometry(UNIT_BYTES, 2))
    yield made
    made.server.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Start]:
    yield from services(tmp_path)


def copies(directory: Path) -> list[Path]:
    above = directory / "cache" / DIRECTORY
    return sorted(above.iterdir()) if above.is_dir() else []


def units(kept: Path) -> bytes:
    """A byte a unit; none while it is being made."""
    return (kept / "units").read_bytes() if (kept / "units").exists() else b""


def whole(directory: Path) -> list[Path]:
    """Versions of which every unit is there."""
    return [path for path in copies(directory) if units(path) == b"\1" * UNITS]


def load(service: ServiceProcess, stored: ServedCheckpoint) -> dict[str, Any]:
    """The answer; what was loaded is right."""
    answer = service.load()
    assert answer["did"] == "ready", service.heard
    assert Path(answer["path"], "model.bin").read_bytes() == stored.data
    return answer


def said(service: ServiceProcess) -> list[str]:
    return [each["text"] for each in service.heard if each["did"] == "said"]


def release(service: ServiceProcess) -> str:
    """After the first step; returns why it was not copied."""
    service.order("release")
    return str(service.hear("copied")["why"])


def load_once(start: Start, stored: ServedCheckpoint, disk_bytes: int = ROOM) -> None:
    """By a keeper that is gone then; its version is on the disk."""
    first = start(stored.url, disk_bytes=disk_bytes)
    assert load(first, stored)["disk_bytes"] == 0
    assert release(first) == ""
    end(first)


def end(service: ServiceProcess) -> None:
    service.order("end")
    service.process.wait()


def test_the_next_start_reads_the_disk(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    load_once(service, stored)
    before = stored.sent_bytes
    assert load(service(stored.url, disk_bytes=ROOM), stored)["disk_bytes"] == SIZE
    assert stored.sent_bytes == before
    [kept] = copies(tmp_path)
    assert {path.name for path in kept.iterdir()} == {"0", "units", "used", "written"}
    assert (kept / "0").read_bytes() == stored.data
    assert (os.stat(kept).st_mode & 0o777, os.stat(kept / "0").st_mode & 0o777) == (0o700, 0o600)


def test_without_the_flag_nothing_is_kept(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    running = service(stored.url)
    load(running, stored)
    running.order("release")
    end(running)
    assert copies(tmp_path) == []


@pytest.mark.parametrize("damage", ["flipped", "cut off", "not marked", "all marked"])
def test_what_is_damaged_is_read_from_the_store(
    damage: str, service: Start, stored: ServedCheckpoint, tmp_path: Path
) -> None:
    load_once(service, stored)
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
    running = service(stored.url, disk_bytes=ROOM)
    found = load(running, stored)
    missing = {
        "flipped": UNIT_BYTES,
        "cut off": SIZE - 9 * UNIT_BYTES,
        "not marked": UNIT_BYTES,
        "all marked": SIZE,
    }
    assert found["disk_bytes"] == SIZE - missing[damage]
    assert stored.sent_bytes - before == missing[damage]
    assert release(running) == ""
    assert (kept / "0").read_bytes() == stored.data
    assert whole(tmp_path) == [kept]


def test_older_versions_make_room(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    load_once(service, stored)
    [old] = copies(tmp_path)
    stored.write(1)
    load_once(service, stored)
    stored.write(2)
    load_once(service, stored, 2 * SIZE + (1 << 20))
    assert len(whole(tmp_path)) == 2
    assert old not in whole(tmp_path)


def test_a_version_in_use_stays(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    load_once(service, stored)
    [old] = whole(tmp_path)
    assert load(service(stored.url, disk_bytes=ROOM), stored)["disk_bytes"] == SIZE
    stored.write(1)
    second = service(stored.url, disk_bytes=SIZE + (1 << 20))
    load(second, stored)
    assert "beside the copies in use" in release(second)
    assert "the checkpoint is not kept on this node's disk" in said(second)[0]
    assert whole(tmp_path) == [old]


def test_two_services_of_one_version(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    both = [service(stored.url, disk_bytes=ROOM), service(stored.url, disk_bytes=ROOM)]
    for each in both:
        load(each, stored)
        each.order("release")
    for each in both:
        assert each.hear("copied")["why"] == "", "the one that does not write says nothing"
    [kept] = whole(tmp_path)
    assert (kept / "0").read_bytes() == stored.data


def test_one_that_is_too_large_is_not_kept(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    small = service(stored.url, disk_bytes=SIZE - 1)
    load(small, stored)
    assert f"bytes exceed the limit of {SIZE - 1:,}" in release(small)
    assert whole(tmp_path) == []


def test_memory_is_given_up_while_it_is_copied(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    running = service(stored.url, disk_bytes=ROOM)
    load(running, stored)
    running.order("release")

    def is_given_up() -> bool:
        running.order("statistics")
        return bool(running.hear("statistics")["arena_bytes"] == 0)

    wait_until(is_given_up, "the memory to be given up")
    wait_until(lambda: whole(tmp_path), "the copy")


def test_what_was_copied_when_the_service_was_killed_counts(
    service: Start, stored: ServedCheckpoint, tmp_path: Path
) -> None:
    first = service(stored.url, disk_bytes=ROOM)
    load(first, stored)
    first.order("release")
    wait_until(lambda: any(any(units(path)) for path in copies(tmp_path)), "the first unit")
    first.process.kill()
    first.process.wait()
    before = stored.sent_bytes
    found = load(service(stored.url, disk_bytes=ROOM), stored)
    assert 0 < found["disk_bytes"] == SIZE - (stored.sent_bytes - before)


@pytest.mark.system
def test_a_full_disk(service: Start, stored: ServedCheckpoint, tmp_path: Path) -> None:
    need_mounts()
    cache = tmp_path / "cache"
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "none", str(cache)], check=True)
    try:
        (cache / "other").write_bytes(bytes(18 << 20))
        running = service(stored.url, disk_bytes=ROOM)
        load(running, stored)
        assert "has no room" in release(running)
        end(running)
        (cache / "other").write_bytes(b"")
        load_once(service, stored)  # tmpfs knows no O_DIRECT, or another kind of it
        again = service(stored.url, disk_bytes=ROOM)
        assert load(again, stored)["disk_bytes"] == SIZE
        end(again)
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)


def test_a_directory_that_others_may_write_to_is_not_used(
    service: Start, stored: ServedCheckpoint, tmp_path: Path
) -> None:
    above = tmp_path / "cache" / DIRECTORY
    above.mkdir(parents=True)
    above.chmod(0o777)
    running = service(stored.url, disk_bytes=ROOM)
    load(running, stored)
    assert "others" in release(running)
    assert list(above.iterdir()) == []


def one_file(tmp_path: Path) -> tuple[DiskCopy, memoryview]:
    """A copy of two units, the first of which is there; and what is in each."""
    file = StoredFile("f", Layout(2 * UNIT_BYTES, UNIT_BYTES, 1), ("s",), (0, 0))
    tmp_path.chmod(0o700)
    copy = DiskCopy.make(str(tmp_path), "d" * 64, [file])
    data = memoryview(bytearray(UNIT_BYTES))
    copy.write(0, 0, data)
    return copy, data


def test_a_disk_that_fails_while_it_is_written(tmp_path: Path) -> None:
    copy, data = one_file(tmp_path)
    for fd in (*copy._fds, *copy._direct):
        if fd >= 0:
            null = os.open("/dev/full", os.O_RDWR)
            os.dup2(null, fd)
            os.close(null)
    for unit in (0, 1):
        with pytest.raises(OSError, match="No space left"):
            copy.write(0, unit, data)
        assert not copy.has(0, unit), "what was half written counts as nothing"
    copy.close()


def test_one_that_is_being_removed_is_not_opened(tmp_path: Path) -> None:
    copy, _ = one_file(tmp_path)
    copy.close()
    directory = tmp_path / DIRECTORY / ("d" * 64)
    with open(directory / "used", "r+b") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        assert DiskCopy.find(str(tmp_path), "d" * 64, copy._files) is None
        with pytest.raises(BlockingIOError):
            DiskCopy.make(str(tmp_path), "d" * 64, copy._files)


def test_a_job_says_what_came_from_the_disk(bootrun: support.Programs, stored: ServedCheckpoint) -> None:
    directory = Path(bootrun.dir)
    units = f"cache/{DIRECTORY}/*/units"
    waits = (
        "import glob, time, bootseer\nbootseer.heartbeat(0)\n"
        f"while [open(path, 'rb').read() for path in glob.glob({units!r})] != [b'\\1' * {UNITS}]:\n"
        "    time.sleep(0.01)  # looks again: a thread of the keeper writes it\n"
    )
    (directory / "reads.py").write_text(reads("/model.bin") + waits)
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
        shutil.rmtree(directory / "events", ignore_errors=True)
        run = bootrun(*words, "reads.py", env={"BOOTSEER_CACHE": os.fspath(directory / "cache")})
        assert run.status == 0, run.stderr
        assert loaded(directory, "read-0")[0] == hashlib.sha256(stored.data).hexdigest()
        [file] = (directory / "events").glob("agent-*.jsonl")
        events = [json.loads(line) for line in file.read_text().splitlines()]
        found += [each["attrs"] for each in events if each["name"] == "checkpoint" and each["kind"] == "end"]
    assert [each.get("disk_bytes") for each in found] == [None, SIZE]


def test_warming_brings_it_to_the_disk(stored: ServedCheckpoint, tmp_path: Path) -> None:
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
    assert len(whole(tmp_path)) == 1
    before = stored.sent_bytes
    assert warm() == f"there {SIZE} 0"
    assert stored.sent_bytes == before


def test_warming_the_disk_takes_nothing_from_who_holds_it(stored: ServedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    environ = {**support.clean_environ(), "BOOTSEER_CACHE": os.fspath(tmp_path / "cache")}
    argv = [os.path.join(os.path.dirname(sys.executable), "bootseer"), "warm", "--load-checkpoint", stored.url]
    sandbox = subprocess.Popen(
        [*argv, "--hold", "60", "train.py"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert sandbox.stdout is not None
        assert sandbox.stdout.readline().startswith("checkpoint: held")
        words = ["--checkpoint-disk", "1GiB", "train.py"]
        subprocess.run([*argv, *words], cwd=tmp_path, env=environ, check=True, timeout=60)
        assert len(whole(tmp_path)) == 1
        assert sandbox.poll() is None
        sandbox.terminate()
        assert sandbox.wait(60) == 0
    finally:
        sandbox.kill()
        sandbox.communicate()
