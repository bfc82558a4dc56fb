"""`bootrun --arena-bytes`: a job that dies after a save resumes from what the save left in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import shm
from tests import support

# Saves at steps 10 and 20 through our writer; the stripes of the last save are overwritten with zeros once it is
# there, so that whoever reads the store finds wrong sums. Rank 1 scribbles over its tensors and dies at step 25.
TRAIN = """
import glob, json, os, signal, sys, time
import bootseer
from bootseer import aio
from bootseer.checkpoint import opening
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.writing.writer import write_version
from bootseer.storage.local.store import LocalStore

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
step, weights = 0, bytearray(3 << 20)
said = {}
if os.environ["BOOTSEER_CHECKPOINT"]:
    with opening.open_source() as opened:
        view = opened.source.map("weights", 0, opened.source.files["weights"].size)
        shape = opened.source.map("step", 0, opened.source.files["step"].size)
        step, weights = int(bytes(shape)), bytearray(view)
        said = {"first": step, "sum": sum(view[::4096]), "counts": opened.source.statistics(),
                "source": type(opened.source).__name__}
        view[:] = bytes(len(view))
with open(f"from-{attempt}-{rank}", "w") as file:
    json.dump(said, file)
for step in range(step + 1, 31):
    weights = bytearray(each + 1 & 255 for each in weights[:4096]) * (len(weights) // 4096)
    bootseer.heartbeat(step)
    if rank == 0 and step % 10 == 0:
        sources = [("weights", MemoryInput([weights])), ("step", MemoryInput([b"%d" % step]))]
        pinned = aio.run_sync(write_version(LocalStore("."), "ckpt", sources, step=step))
        if RUIN and step == 20:
            for file in pinned.files:
                for name in file.stripes:
                    with open(name, "r+b") as stripe:
                        stripe.write(bytes(os.path.getsize(name)))
    if step == 25 and attempt == "0":
        if rank == 0:
            open("saved", "w").close()
            signal.pause()
        while not os.path.exists("saved"):
            time.sleep(0.01)
        sys.exit(3)
"""


def loaded(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("fork", ["on", "off"])
@pytest.mark.parametrize("has_arena", [True, False], ids=["arena", "store"])
def test_a_job_resumes_from_its_newest_save(has_arena: bool, fork: str, bootrun: support.Programs) -> None:
    directory, before = Path(bootrun.dir), shm.files()
    (directory / "train.py").write_text(TRAIN.replace("RUIN", str(has_arena)))
    (directory / "ckpt").mkdir()
    run = bootrun(
        "--nproc-per-node", "2", "--max-restarts", "1", "--fork-ranks", fork, "--shutdown-timeout", "5",
        "--load-checkpoint", "ckpt", *(("--arena-bytes", "16MiB") if has_arena else ()), "train.py",
    )  # fmt: skip
    assert run.status == 0, run.stderr
    resumed = [loaded(directory, f"from-1-{rank}") for rank in range(2)]
    assert resumed[0] == resumed[1]
    assert resumed[0]["first"] == 20 and resumed[0]["sum"] == 20 * (3 << 20) // 4096
    assert resumed[0]["source"] == "ArenaSource"
    assert resumed[0]["counts"]["read_bytes"] == 0
    assert not [name for name in shm.left(before) if "bootseer" in name]
