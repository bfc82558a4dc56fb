"""One start with everything, and each of its stages broken in turn: the job runs, and a report says the cost."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.integration.setup_jobs import agent_events
from tests.integration.test_image_setup import BOOTSEER, TELL, Job, built, job, root, told
from tests.support import lacking
from tests.testing.faulty_http import FaultyHttpServer

__all__ = ["built", "job", "root"]  # fixtures
pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

WEIGHTS = random.Random(0).randbytes(1 << 20)
RIGHT = hashlib.sha256(WEIGHTS).hexdigest()
READ = """
import glob, hashlib, os
path = os.environ["BOOTSEER_CHECKPOINT"]
found = [path] if os.path.isfile(path) else glob.glob(path + "/model.bin") or glob.glob(path + "/*/model.bin")
with open(found[0], "rb") as file:
    print("READ " + hashlib.sha256(file.read()).hexdigest(), flush=True)
"""
MAKES = """
if found["caches"]:
    open(found["caches"] + "/aa-made", "w").write("x" * 1000)
"""
STAGES = {"image", "env", "caches", "checkpoint", "rendezvous", "spawn"}
# In a process of ours, by its module: so many of them end as soon as they begin.
HOOK = """
import os, sys
if "MODULE" in sys.orig_argv:
    for number in range(COUNT):
        try:
            os.close(os.open(f"MARKER{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os._exit(3)
"""


class Whole:
    """Starts of a job with image, set-up, compile caches and checkpoint, each on a fresh node."""

    def __init__(self, job: Job, program: support.Programs) -> None:
        self.job, self._program = job, program
        self.flags = ["--env-way", "there,mount,unpack", "--load-checkpoint", f"{job.folder}/ckpt"]
        step = job.folder / "ckpt" / "step-10"
        step.mkdir(parents=True)
        step.joinpath("model.bin").write_bytes(WEIGHTS)
        job.script.write_text(READ + TELL + MAKES)

    def start(self, *flags: str) -> support.Run:
        """Status 0, and ranks have what they should."""
        run = self.job.start(*self.flags, *flags, caches=True)
        assert f"READ {RIGHT}" in run.stdout, run.stderr
        assert told(run)["version"] == "1.0"
        assert {event.stage for event in agent_events(self.job.logs) if event.kind == "end"} >= STAGES
        return run

    def let_die(self, directory: Path, module: str, count: int) -> Path:
        """So many processes of this module; a file that is there after the first one has."""
        hook = directory / "hook"
        hook.mkdir()
        text = HOOK.replace("MODULE", module).replace("COUNT", f"{count}").replace("MARKER", f"{hook}/died")
        hook.joinpath("sitecustomize.py").write_text(text)
        self.job.environ["PYTHONPATH"] = os.fspath(hook)
        return hook / "died0"

    def enter_by(self, *words: str) -> None:
        """Later starts are made by this command."""
        self.job.bootrun.prefix = (*words, support.BOOTRUN)

    def prepare(self) -> None:
        """A first start, then a node that has nothing."""
        self.start()
        assert self.fallbacks() == []
        self.job.renew()

    def fallbacks(self) -> list[dict[str, Any]]:
        """What the report says of the last start."""
        run = self._program(BOOTSEER, "report", self.job.logs, "--json")
        assert run.status == 0, run.stderr
        found: list[dict[str, Any]] = json.loads(run.stdout)["fallbacks"]
        return found

    def fell_back(self, *stages: str) -> None:
        """These and no others did, and what that cost is known."""
        found = self.fallbacks()
        assert {each["stage"] for each in found} == set(stages), found
        for each in found:
            assert each["longest_s"] is not None and each["nodes"] and each["why"] in each["line"]


@pytest.fixture
def whole(job: Job, program: support.Programs) -> Whole:
    return Whole(job, program)


def test_nothing_is_broken(whole: Whole) -> None:
    whole.prepare()
    whole.start()
    assert whole.fallbacks() == [] and whole.job.how() == "mount" and whole.job.installs() == 1


@pytest.mark.parametrize(
    ("module", "count", "stages", "how"),
    [
        ("bootseer.mounts.tree_daemon.process", 1, [], "mount"),  # another one is started
        ("bootseer.env.service.main", 1, ["env"], "installed"),
        ("bootseer.env.compile_cache.service", 9, ["caches"], "mount"),
        ("bootseer.checkpoint.service.service", 1, None, "mount"),  # another one, unless it was to load already
    ],
)
def test_processes_that_die_at_once(
    whole: Whole, tmp_path: Path, module: str, count: int, stages: list[str] | None, how: str
) -> None:
    whole.prepare()
    died = whole.let_die(tmp_path, module, count)
    whole.start()
    assert died.exists()
    assert whole.job.how() == how
    if stages is not None:
        whole.fell_back(*stages)


def test_each_process_that_keeps_the_checkpoint_dies_at_once(whole: Whole, tmp_path: Path) -> None:
    """Of a folder nobody knows then which version is meant; a file is opened by ranks themselves."""
    whole.prepare()
    died = whole.let_die(tmp_path, "bootseer.checkpoint.service.service", 9)
    run = whole.job.start(*whole.flags, caches=True, status=1)
    assert died.exists()
    assert re.search("^bootrun: error: --load-checkpoint.*; start the job again", run.stderr, re.MULTILINE)
    assert "READ" not in run.stdout
    whole.flags[-1] += "/step-10/model.bin"
    died.unlink()
    whole.start()
    assert died.exists()
    whole.fell_back("checkpoint")


def test_the_store_of_environments_is_gone(whole: Whole, free_port: int) -> None:
    whole.prepare()
    whole.start("--env-store", f"http://127.0.0.1:{free_port}/store")
    assert whole.job.how() == "installed" and whole.job.installs() == 2
    whole.fell_back("env", "caches")


def test_nobody_is_trusted_for_the_environment(whole: Whole) -> None:
    """It comes from a web server, and nobody has signed it."""
    whole.prepare()
    files = {f"store/{path.relative_to(whole.job.store)}": path.read_bytes() for path in stored(whole.job.store)}
    with FaultyHttpServer(files) as server:
        whole.start("--env-store", f"{server.url}/store")
    assert whole.job.how() == "installed" and whole.job.installs() == 2
    whole.fell_back("env", "caches")


def test_without_the_right_to_mount(whole: Whole) -> None:
    whole.prepare()
    if shutil.which("setpriv") is None:
        lacking("setpriv is not installed")
    whole.enter_by("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--")
    whole.start()
    assert whole.job.how() == "unpack"
    whole.fell_back("image", "checkpoint")  # files of a mount are not seen there: ranks open the saver's own


def test_a_full_disk_for_what_is_cached(whole: Whole) -> None:
    whole.prepare()
    cache = whole.job.cache
    cache.mkdir()
    whole.job.environ["BOOTSEER_CACHE_LIMIT"] = "1GiB"
    script = f'mount -t tmpfs -o size=3m,mode=700 tmpfs {cache} && "$@"; done=$?; df {cache}; exit $done'
    whole.enter_by("unshare", "--mount", "sh", "-c", script, "sh")
    run = whole.start()
    (used,) = re.findall(r"(\d+)% \S+$", run.stdout, re.MULTILINE)
    assert int(used) > 90, run.stdout


def stored(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]
