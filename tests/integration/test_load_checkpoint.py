"""`bootrun --load-checkpoint`: the newest complete save, the same for all ranks, before they start."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import resolve
from bootseer.checkpoint.writing.writer import write_version
from bootseer.storage.local.store import LocalStore
from tests import support
from tests.integration.mounting import need_fuse
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.unit.bootseer.checkpoint.made_files import pt_file

# Trains with plain torch.save and torch.load: step folders, as savers make them. Rank 1 dies at step 25.
TRAIN = """
import json, os, signal, sys, time
import torch
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
path = os.environ["BOOTSEER_CHECKPOINT"]
state = torch.load(os.path.join(path, "state.pt")) if path else {"step": 0, "weight": torch.zeros(4)}
first = state["step"]
state["weight"] += 100 * rank  # what a rank does to its tensors is its own
state["weight"] -= 100 * rank
with open(f"from-{attempt}-{rank}", "w") as file:
    json.dump([first, state["weight"].tolist(), os.environ.get("BOOTSEER_CHECKPOINT_DIGEST", "")], file)
for step in range(first + 1, 31):
    state = {"step": step, "weight": state["weight"] + 1}
    if rank == 0 and step % 10 == 0:
        os.makedirs(f"ckpt/step-{step}.tmp")
        torch.save(state, f"ckpt/step-{step}.tmp/state.pt")
        os.rename(f"ckpt/step-{step}.tmp", f"ckpt/step-{step}")
    if rank == 0 and step == 25:
        os.makedirs("ckpt/step-25.tmp", exist_ok=True)  # a save that will never be complete
        open("ckpt/step-25.tmp/state.pt", "w").close()
        open("saved", "w").close()
        if attempt == "0":
            signal.pause()  # until it is stopped
    if rank == 1 and step == 25 and attempt == "0":
        while not os.path.exists("saved"):
            time.sleep(0.01)
        sys.exit(3)
"""
READS = """
import hashlib, json, os
path = os.environ["BOOTSEER_CHECKPOINT"] + "BELOW"
with open(path, "rb") as file:
    found = hashlib.sha256(file.read()).hexdigest()
with open("read-" + os.environ["RANK"], "w") as file:
    json.dump([found, path, os.environ.get("BOOTSEER_CHECKPOINT_DIGEST", "")], file)
"""


def reads(below: str = "") -> str:
    return READS.replace("BELOW", below)


def loaded(folder: Path, name: str) -> list[object]:
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


@pytest.fixture
def folder(bootrun: support.Programs) -> Path:
    """Where jobs run."""
    return Path(bootrun.dir)


@pytest.mark.parametrize("fork", ["on", "off"])
def test_a_restart_resumes_from_the_newest_complete_save(
    fork: str, bootrun: support.Programs, folder: Path
) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "ckpt").mkdir()
    run = bootrun(
        "--nproc-per-node", "2", "--max-restarts", "1", "--fork-ranks", fork, "--shutdown-timeout", "5",
        "--load-checkpoint", "ckpt", "train.py",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    assert "there is no checkpoint yet" in run.stderr
    assert [loaded(folder, f"from-0-{rank}")[:2] for rank in range(2)] == [[0, [0.0] * 4]] * 2
    resumed = [loaded(folder, f"from-1-{rank}") for rank in range(2)]
    assert resumed[0] == resumed[1]
    assert resumed[0][:2] == [20, [20.0] * 4] and resumed[0][2]


def test_nodes_load_the_same(bootrun: support.Programs, folder: Path, free_port: int, tmp_path: Path) -> None:
    """Two nodes at one coordinator, while newer versions come: no two ranks differ."""
    (folder / "reads.py").write_text(reads())
    store = LocalStore(str(tmp_path))
    for number in range(3):
        (tmp_path / "plain").mkdir(exist_ok=True)
        (tmp_path / "plain" / f"step-{number}").mkdir()
        (tmp_path / "plain" / f"step-{number}" / "a.bin").write_bytes(os.urandom(50_000))
    words = [
        "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x",
        "--rdzv-endpoint", f"localhost:{free_port}", "--fork-ranks", "off",
        "--load-checkpoint", f"{tmp_path}/plain",
    ]  # fmt: skip
    (folder / "reads.py").write_text(reads("/a.bin"))
    programs = [bootrun.start(*words, "reads.py") for _ in range(2)]
    for program in programs:
        run = program.wait()
        assert run.status == 0, run.stderr
    found = [loaded(folder, f"read-{rank}") for rank in range(4)]
    assert len({(each[0], each[2]) for each in found}) == 1
    assert found[0][2] == aio.run_sync(resolve(store, "plain")).digest
    aio.close()


def test_striped_versions(bootrun: support.Programs, folder: Path, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    pinned = aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", [("model.bin", MemoryInput([data]))]))
    aio.close()
    (folder / "reads.py").write_text(reads("/model.bin"))
    run = bootrun("--nproc-per-node", "2", "--load-checkpoint", f"{tmp_path}/ckpt", "reads.py")
    assert run.status == 0, run.stderr
    for rank in range(2):
        assert loaded(folder, f"read-{rank}")[::2] == [hashlib.sha256(data).hexdigest(), pinned.digest]


@pytest.mark.system
def test_nodes_open_their_own_files_by_name(
    bootrun: support.Programs, folder: Path, free_port: int, tmp_path: Path
) -> None:
    """Two nodes of a striped version with a file for each: unmodified code, and no node reads the other's."""
    need_fuse()
    data = [os.urandom(100_000) for _ in range(2)]
    files = [(f"node-{number}.bin", MemoryInput([each])) for number, each in enumerate(data)]
    aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", files))
    aio.close()
    (folder / "reads.py").write_text(READS.replace('"BELOW"', "'/node-%s.bin' % os.environ['GROUP_RANK']"))
    words = [
        "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x",
        "--rdzv-endpoint", f"localhost:{free_port}", "--load-checkpoint", f"{tmp_path}/ckpt", "reads.py",
    ]  # fmt: skip
    programs = [bootrun.start(*words) for _ in range(2)]
    for program in programs:
        run = program.wait()
        assert run.status == 0, run.stderr
    sums = [hashlib.sha256(each).hexdigest() for each in data]
    assert [loaded(folder, f"read-{rank}")[0] for rank in range(4)] == [sums[0], sums[0], sums[1], sums[1]]


def test_a_store_that_is_away_for_a_moment_is_waited_for(bootrun: support.Programs, folder: Path) -> None:
    (folder / "reads.py").write_text(reads())
    plan = [HttpFault(HttpKind.STATUS, method=method, status=503) for method in ("HEAD", "GET")]
    with FaultyHttpServer({"model.bin": b"bytes"}, plan) as server:
        program = bootrun.start("--load-checkpoint", server.url_of("model.bin"), "reads.py")
        support.wait_until(lambda: "trying again" in program.stderr, what="it says so")
        server.plan.clear()
        run = program.wait()
    assert run.status == 0, run.stderr
    assert run.stderr.count("trying again") == 1
    assert loaded(folder, "read-0")[0] == hashlib.sha256(b"bytes").hexdigest()


def test_ranks_read_for_themselves_without_a_service(
    bootrun: support.Programs, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_bytes(b"bytes")
    (folder / "reads.py").write_text(reads())
    run = bootrun("--load-checkpoint", f"{tmp_path}/model.bin", "--checkpoint-memory", "0", "reads.py")
    assert run.status == 0, run.stderr
    assert loaded(folder, "read-0")[1] == f"{tmp_path}/model.bin"
    assert "the checkpoint is not shared on this node" in run.stderr


@pytest.mark.parametrize(
    ("url", "says"),
    [("nosuch://x/y", "nosuch")],
)
def test_a_store_that_does_not_answer_ends_the_job(
    url: str, says: str, bootrun: support.Programs, folder: Path
) -> None:
    (folder / "reads.py").write_text(reads())
    run = bootrun("--load-checkpoint", url, "reads.py")
    assert run.status == 1
    assert says in run.stderr and "Traceback" not in run.stderr
    assert not (folder / "read-0").exists()


@pytest.mark.parametrize(
    "flag", [("--load-checkpoint", ""), ("--checkpoint-memory", "much"), ("--arena-bytes", "-1")]
)
def test_mistakes(flag: tuple[str, str], bootrun: support.Programs, folder: Path) -> None:
    (folder / "x.py").write_text("")
    run = bootrun(*flag, "x.py")
    assert run.status == 2 and flag[0] in run.stderr


def test_a_stop_while_it_is_loaded(bootrun: support.Programs, folder: Path) -> None:
    (folder / "reads.py").write_text(reads())
    with FaultyHttpServer({"model.bin": b"1" * (20 << 20)}, rate=1e5) as server:
        program = bootrun.start(
            "--load-checkpoint", server.url_of("model.bin"), "--shutdown-timeout", "3", "reads.py"
        )
        support.wait_until(lambda: server.served_bytes["model.bin"] > 50_000, what="it reads")
        program.process.send_signal(signal.SIGTERM)
        run = program.wait()
    assert run.status == 143, run.stderr
    assert not (folder / "read-0").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", [HttpKind.SILENCE, HttpKind.STATUS])
def test_a_stop_while_the_version_is_looked_up(
    kind: HttpKind, signum: int, bootrun: support.Programs, folder: Path
) -> None:
    """However long the store is silent or away: nothing has begun that would have to be waited for."""
    (folder / "reads.py").write_text(reads())
    plan = [HttpFault(kind, method=method, status=503) for method in ("HEAD", "GET")]
    with FaultyHttpServer({"model.bin": b"bytes"}, plan) as server:
        program = bootrun.start("--load-checkpoint", server.url_of("model.bin"), "reads.py")
        support.wait_until(lambda: bool(server.requests), what="it asks")
        program.signal(signum)
        run = program.wait(10.0)
    assert run.status == 128 + signum, run.stderr
    assert not (folder / "read-0").exists()


def test_a_stop_of_nodes_while_the_version_is_looked_up(bootrun: support.Programs, free_port: int) -> None:
    """The signal comes to the node that does not look it up."""
    plan = [HttpFault(HttpKind.SILENCE, method=method) for method in ("HEAD", "GET")]
    with FaultyHttpServer({"model.bin": b"bytes"}, plan) as server:
        words = [
            "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x",
            "--rdzv-endpoint", f"localhost:{free_port}",
            "--load-checkpoint", server.url_of("model.bin"), "--no-python", "/bin/true",
        ]  # fmt: skip
        first = bootrun.start("--rdzv-conf", "is_host=1", *words)
        second = bootrun.start("--rdzv-conf", "is_host=0", *words)
        # Of programs no environments are compared: the attempt is due when the second has come.
        support.wait_until(
            lambda: all("no secret is set" in each.stderr for each in (first, second)), what="both take part"
        )
        second.signal(signal.SIGTERM)
        runs = [each.wait(10.0) for each in (first, second)]
    assert [run.status for run in runs] == [143, 143], [run.stderr for run in runs]


@pytest.mark.parametrize("lives", [True, False])
def test_another_service_finds_the_version_or_the_job_ends(
    lives: bool, bootrun: support.Programs, free_port: int
) -> None:
    """Without a version for all each rank would choose for itself, and they could differ."""
    plan = [HttpFault(HttpKind.SILENCE, method=method) for method in ("HEAD", "GET")]
    with FaultyHttpServer({"model.bin": b"bytes"}, plan) as server:
        words = [
            "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x",
            "--rdzv-endpoint", f"localhost:{free_port}",
            "--load-checkpoint", server.url_of("model.bin"), "--no-python", "/bin/true",
        ]  # fmt: skip
        first = bootrun.start("--rdzv-conf", "is_host=1", *words)
        support.wait_until(lambda: services(first), what="the coordinator's keeper runs")
        if lives:
            server.plan.clear()
        kill(services(first))
        second = bootrun.start("--rdzv-conf", "is_host=0", *words)
        if not lives:
            support.wait_until(lambda: kill(services(first)) or first.process.poll() is not None, 20.0)
        runs = [each.wait(20.0) for each in (first, second)]
    for run in runs:
        assert run.status == (0 if lives else 1), run.stderr
        assert ("has failed on" in run.stderr and "start the job again" in run.stderr) != lives
        assert "Traceback" not in run.stderr


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def services(program: support.Program) -> list[int]:
    """Of this bootrun, its children among them."""
    below = support.descendants(program.pid)
    return [each.pid for each in below if "bootseer.checkpoint.service.service" in each.command]


def test_a_checkpoint_that_cannot_be_loaded_is_named(bootrun: support.Programs, folder: Path) -> None:
    """The job trains from scratch, as one that has saved nothing yet, and logs a warning."""
    (folder / "ckpt" / "step-20").mkdir(parents=True)
    (folder / "ckpt" / "step-20" / "state.pt").touch()
    (folder / "x.py").write_text("import os\nassert os.environ['BOOTSEER_CHECKPOINT'] == ''\n")
    run = bootrun("--load-checkpoint", "ckpt", "x.py")
    assert run.status == 0, run.stderr
    assert "the job trains from scratch" in run.stderr and "step-20" in run.stderr
    assert "no checkpoint yet" not in run.stderr


def test_a_half_done_save_is_passed_over_with_a_line_and_an_event(bootrun: support.Programs, folder: Path) -> None:
    for step in (10, 20):
        (folder / "ckpt" / f"step-{step}").mkdir(parents=True)
        (folder / "ckpt" / f"step-{step}" / "model.pt").write_bytes(pt_file()[: None if step == 10 else -30])
    script = "import os\nassert os.environ['BOOTSEER_CHECKPOINT_VERSION'] == 'step-10', os.environ\n"
    (folder / "x.py").write_text(script)
    run = bootrun("--load-checkpoint", "ckpt", "--events-dir", "events", "x.py")
    assert run.status == 0, run.stderr
    assert (
        "warning: the checkpoint is step-10, not a newer one: step-20: model.pt has no zip directory" in run.stderr
    )
    told = "".join(path.read_text() for path in (folder / "events").glob("*.jsonl"))
    assert '"name":"passed_over"' in told and "step-20: model.pt has no zip directory" in told


# What is wrong with a save that looks whole; only its loader tells.
TORN = """
import os, pickle, torch
path = os.environ["BOOTSEER_CHECKPOINT"]
step = torch.load(os.path.join(path, "state.pt"))["step"]
if step == 20:
    raise pickle.UnpicklingError("pickle data was truncated")
with open("from-" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w") as file:
    file.write(str(step))
"""


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / "ckpt" / f"step-{step}").mkdir(parents=True)
        torch.save({"step": step}, folder / "ckpt" / f"step-{step}" / "state.pt")
    (folder / "torn.py").write_text(TORN)


def test_what_ranks_could_not_read_is_not_taken_again(bootrun: support.Programs, folder: Path) -> None:
    save_steps(folder, 10, 20)
    run = bootrun("--max-restarts", "1", "--load-checkpoint", "ckpt", "torn.py")
    assert run.status == 0, run.stderr
    assert (folder / "from-1").read_text() == "10"
    [warned] = [line for line in run.stderr.splitlines() if "warning: an older version" in line]
    assert "step-10" in warned and "step-20" in warned and "rank 0" in warned


def test_the_only_one_is_tried_again(bootrun: support.Programs, folder: Path) -> None:
    save_steps(folder, 20)
    run = bootrun("--max-restarts", "1", "--load-checkpoint", "ckpt", "torn.py")
    assert run.status == 1 and "an older version" not in run.stderr
    assert not list(folder.glob("from-*"))
