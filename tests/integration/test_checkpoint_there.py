"""BOOTSEER_CHECKPOINT names files that open, or no rank starts: a job never begins from nothing in silence."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.checkpoint.writing.writer import write_version
from bootseer.storage.local.store import LocalStore
from tests import support
from tests.integration.mounting import need_fuse
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.unit.bootseer.checkpoint.sources import SmallGeometry

UNIT_BYTES = 1 << 20
OLD, NEW = random.Random(1).randbytes(4 * UNIT_BYTES), random.Random(2).randbytes(4 * UNIT_BYTES)
# As people write it: what is not there is no checkpoint yet.
LOOKS = """
import hashlib, os
path = os.path.join(os.environ.get("BOOTSEER_CHECKPOINT", ""), "model.bin")
found = "nothing"
if os.path.exists(path):
    with open(path, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
with open("began-" + os.environ["RANK"], "w") as file:
    file.write(found)
"""
NO_FUSE = {"FUSE_LIBRARY_NAME": "no-such-library"}


@pytest.fixture
def folder(bootrun: support.Programs) -> Path:
    """Where jobs run, with the script."""
    (Path(bootrun.dir) / "looks.py").write_text(LOOKS)
    return Path(bootrun.dir)


@pytest.fixture
def saved(tmp_path: Path) -> list[Pinned]:
    """Two versions, the older first, in tmp_path/ckpt."""
    return [save(tmp_path, data) for data in (OLD, NEW)]


def save(tmp_path: Path, data: bytes) -> Pinned:
    store, files = LocalStore(str(tmp_path)), [("model.bin", MemoryInput([data]))]
    found = aio.run_sync(write_version(store, "ckpt", files, geometry=SmallGeometry(UNIT_BYTES, 2)))
    aio.close()
    return found


def damage(tmp_path: Path, pinned: Pinned, how: str) -> None:
    stripe = tmp_path / pinned.files[0].stripes[1]
    if how == "flipped":  # unit 3: the second of its stripe
        with stripe.open("r+b") as file:
            file.seek(UNIT_BYTES + 17)
            file.write(b"wrong")
    elif how == "cut":
        os.truncate(stripe, UNIT_BYTES + 5)
    elif how == "missing":
        stripe.unlink()
    elif how == "manifest":
        (stripe.parent / "manifest.json").write_bytes(b"{}")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def began(folder: Path, rank: int = 0) -> str:
    """What a rank has found; "" if it was not started."""
    path = folder / f"began-{rank}"
    return path.read_text() if path.exists() else ""


# ---- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_version_ends_the_job(
    how: str, bootrun: support.Programs, folder: Path, tmp_path: Path, saved: list[Pinned]
) -> None:
    """It says what is wrong, how to look at all of it, and which older version there is."""
    damage(tmp_path, saved[1], how)
    run = bootrun("--nproc-per-node", "2", "--load-checkpoint", f"{tmp_path}/ckpt", "looks.py")
    assert (run.status, began(folder)) == (1, ""), run.stderr
    said = [line for line in run.stderr.splitlines() if "bootrun: error: " in line]
    assert any("--load-checkpoint" in line and ".s001" in line for line in said), run.stderr
    if how == "flipped":
        assert "model.bin: unit 3 is damaged" in run.stderr
    assert f"bootseer ckpt verify {tmp_path}/ckpt" in run.stderr
    assert saved[0].version in run.stderr and "--checkpoint-fallback older" in run.stderr


@pytest.mark.parametrize("how", ["flipped", "missing", "manifest"])
def test_an_older_version_is_taken_where_that_was_asked_for(
    how: str, bootrun: support.Programs, folder: Path, tmp_path: Path, saved: list[Pinned]
) -> None:
    damage(tmp_path, saved[1], how)
    run = bootrun("--load-checkpoint", f"{tmp_path}/ckpt", "--checkpoint-fallback", "older", "looks.py")
    assert (run.status, began(folder)) == (0, digest(OLD)), run.stderr
    warned = [line for line in run.stderr.splitlines() if "warning: " in line]
    assert any(saved[1].version in line and "an older" in line for line in warned), run.stderr


def test_nodes_fall_back_together(
    bootrun: support.Programs, folder: Path, free_port: int, tmp_path: Path, saved: list[Pinned]
) -> None:
    """One of them finds the damage; the others had nothing to complain of, or have begun."""
    need_fuse()
    damage(tmp_path, saved[1], "flipped")
    words = [
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"localhost:{free_port}",
        "--load-checkpoint", f"{tmp_path}/ckpt", "--checkpoint-fallback", "older", "looks.py",
    ]  # fmt: skip
    programs = [bootrun.start(*words) for _ in range(2)]
    for program in programs:
        run = program.wait()
        assert run.status == 0, run.stderr
    assert [began(folder, rank) for rank in range(2)] == [digest(OLD)] * 2


def test_no_older_version_is_no_reason_to_start_from_nothing(
    bootrun: support.Programs, folder: Path, tmp_path: Path
) -> None:
    damage(tmp_path, save(tmp_path, NEW), "flipped")
    run = bootrun("--load-checkpoint", f"{tmp_path}/ckpt", "--checkpoint-fallback", "older", "looks.py")
    assert (run.status, began(folder)) == (1, ""), run.stderr
    assert "model.bin: unit 3 is damaged" in run.stderr and "no older" in run.stderr


@pytest.mark.parametrize("falls_back", [False, True])
def test_damage_that_only_a_reading_rank_meets(
    falls_back: bool, bootrun: support.Programs, folder: Path, tmp_path: Path, saved: list[Pinned]
) -> None:
    """Through a mount nothing is read before a rank asks for it; what its script makes of the error counts not."""
    need_fuse()
    damage(tmp_path, saved[1], "flipped")
    script = LOOKS.replace("found = hashlib", "try: found = hashlib") + "\n"
    script = script.replace(
        ".hexdigest()\n", ".hexdigest()\n        except OSError: import time; time.sleep(60)\n"
    )
    (folder / "looks.py").write_text(script)
    words = ["--checkpoint-fallback", "older"] if falls_back else []
    run = bootrun("--load-checkpoint", f"{tmp_path}/ckpt", "--checkpoint-memory", "0", *words, "looks.py")
    assert "model.bin: unit 3 is damaged" in run.stderr
    assert (run.status, began(folder)) == ((0, digest(OLD)) if falls_back else (1, "")), run.stderr


# ---- other ways to the files ---------------------------------------------------------------------------------


def test_without_memory_and_mounts_the_files_come_to_the_disk(
    bootrun: support.Programs, folder: Path, tmp_path: Path, saved: list[Pinned]
) -> None:
    run = bootrun(
        "--load-checkpoint", f"{tmp_path}/ckpt", "--checkpoint-memory", "0", "looks.py",
        env=NO_FUSE,
    )  # fmt: skip
    assert (run.status, began(folder)) == (0, digest(NEW)), run.stderr
    assert "warning: " in run.stderr and "disk" in run.stderr
    assert not list((folder / "tmp").rglob("model.bin")), "it is taken away again"


def test_services_that_are_killed_cost_no_checkpoint(
    bootrun: support.Programs, folder: Path, tmp_path: Path
) -> None:
    """The last of them takes no memory."""
    need_fuse()
    with FaultyHttpServer({}, rate=4e6) as server:
        save(tmp_path, NEW)
        for path in (tmp_path / "ckpt").rglob("*"):
            if path.is_file():
                server.files[path.relative_to(tmp_path).as_posix()] = memoryview(path.read_bytes())
        program = bootrun.start("--load-checkpoint", f"{server.url}/ckpt", "looks.py")
        kill_services(program, 3)
        server.rate = None
        run = program.wait()
    assert (run.status, began(folder)) == (0, digest(NEW)), run.stderr


def kill_services(program: support.Program, count: int) -> None:
    """So many of them, one after the other, as soon as they are there."""
    killed: set[int] = set()

    def news() -> set[int]:
        """{0} when the program has ended."""
        return set(services(program)) - killed or (set() if program.process.poll() is None else {0})

    while len(killed) < count and (found := support.wait_until(news)) != {0}:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        killed |= found


def services(program: support.Program) -> list[int]:
    """Without the processes that they fork."""
    below = [
        each for each in support.descendants(program.pid) if "bootseer.checkpoint.service.service" in each.command
    ]
    pids = {each.pid for each in below}
    return [each.pid for each in below if each.ppid not in pids]


def test_a_store_that_refuses_the_bytes_ends_the_job(bootrun: support.Programs, folder: Path) -> None:
    plan = [HttpFault(HttpKind.STATUS, status=403, first=1, last=None)]
    with FaultyHttpServer({"model.bin": NEW}, plan) as server:
        run = bootrun("--load-checkpoint", server.url_of("model.bin"), "looks.py")
    assert (run.status, began(folder)) == (1, ""), run.stderr
    assert "model.bin" in run.stderr and "Traceback" not in run.stderr


def test_nodes_that_were_reported_of_no_checkpoint(
    bootrun: support.Programs, folder: Path, free_port: int, tmp_path: Path, saved: list[Pinned]
) -> None:
    """A node that was started otherwise would begin from nothing while the other goes on."""
    words = [
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"localhost:{free_port}",
    ]  # fmt: skip
    programs = [
        bootrun.start("--rdzv-conf", "is_host=1", *words, "--load-checkpoint", f"{tmp_path}/ckpt", "looks.py"),
        bootrun.start("--rdzv-conf", "is_host=0", *words, "looks.py"),
    ]
    runs = [program.wait() for program in programs]
    assert [run.status for run in runs] == [1, 1]
    assert any("without --load-checkpoint" in run.stderr for run in runs)
    assert (began(folder, 0), began(folder, 1)) in (("", ""), (digest(NEW), ""))


# ---- typos ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("{tmp}/rnu1/ckpt", "mkdir -p {tmp}/rnu1"),
        ("hfds://namenode/ckpt", "hdfs://"),
        ("s3:/bucket/ckpt", "s3://"),
        ("{tmp}/file/ckpt", "is not a directory"),
    ],
)
@pytest.mark.parametrize("flag", ["--load-checkpoint", "--env-store"])
def test_a_typo_is_an_error_at_once(
    flag: str, url: str, says: str, bootrun: support.Programs, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run = bootrun(flag, url.format(tmp=tmp_path), "looks.py", env={"BOOTSEER_CHECKPOINT": ""})
    assert (run.status, began(folder)) == (2 if url.startswith("s3:") else 1, ""), run.stderr
    assert says.format(tmp=tmp_path) in run.stderr and "bootrun: error: " in run.stderr


def test_who_must_resume_gets_an_error_where_there_is_nothing(bootrun: support.Programs, folder: Path) -> None:
    run = bootrun("--load-checkpoint", "ckpt", "--require-checkpoint", "looks.py")
    assert (run.status, began(folder)) == (1, ""), run.stderr
    assert "--require-checkpoint" in run.stderr
    (folder / "ckpt" / "step-3").mkdir(parents=True)
    (folder / "ckpt" / "step-3" / "model.safetensors").touch()
    run = bootrun("--load-checkpoint", "ckpt", "--require-checkpoint", "looks.py")
    assert (run.status, began(folder)) == (1, ""), run.stderr
    assert "step-3" in run.stderr


def test_files_that_went_with_their_service_come_back(
    bootrun: support.Programs, folder: Path, tmp_path: Path
) -> None:
    """Ranks have begun, and look for them later."""
    save(tmp_path, NEW)
    waits = 'import os, time\nopen("waits", "w").close()\nwhile not os.path.exists("go"): time.sleep(0.01)\n'
    (folder / "looks.py").write_text(waits + LOOKS)
    program = bootrun.start("--load-checkpoint", f"{tmp_path}/ckpt", "looks.py")
    support.wait_until((folder / "waits").exists, 20.0)
    for times in (1, 2):
        for pid in services(program):
            os.kill(pid, signal.SIGKILL)
        support.wait_until(lambda count=times: program.stderr.count("files are restored") == count, 20.0)  # type: ignore[misc]
    (folder / "go").touch()
    run = program.wait()
    assert (run.status, began(folder)) == (0, digest(NEW)), run.stderr
    assert not list((folder / "tmp").glob("bootseer-arena-*"))
