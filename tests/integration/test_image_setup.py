"""`--image` with `--setup`: an environment on top of an image, made in it once, and restored on the next node."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from tests import support
from tests.integration.captured_envs import environ_of
from tests.integration.image_roots import PREFIX, add_pip, make_root
from tests.integration.mounted_trees import need_mounts
from tests.integration.setup_jobs import agent_events, services_end, setup_span
from tests.made_wheels import make_wheel
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(180),
]

DEADLINE_S = 90.0
BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
# What a rank finds: its environment above the image's, and in which folder caches are kept.
TELL = """
import json, os, sys
import small
found = {"version": small.VERSION, "prefix": sys.prefix, "executable": sys.executable, "path": os.environ["PATH"],
         "base": sys.base_prefix, "venv": os.environ.get("VIRTUAL_ENV"), "file": small.__file__,
         "compiled": os.path.exists(small.__cached__), "caches": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
         "hello": open("/opt/data/hello.txt").read()}
try:
    import of_image
    found["of_image"] = of_image.VERSION
except ImportError:
    pass
if found["caches"]:
    os.makedirs(found["caches"], exist_ok=True)
    found["cached"] = os.listdir(found["caches"])
sys.modules["_bootseer_rank"].heartbeat(1, {})
print("TOLD " + json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    """A root file system whose Python has pip and a package of its own."""
    directory = tempfile.mkdtemp(prefix="image-root-")
    os.chmod(directory, 0o755)
    version = make_root(directory)
    Path(add_pip(directory, version), "of_image.py").write_text("VERSION = 'image'\n")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def built(root: str) -> tuple[dict[str, bytes], str]:
    """The files of the image's tree, and its digest."""
    files: dict[str, bytes] = {}
    done = build(DirectorySource(root), lambda digest, data: files.__setitem__(f"packs/{digest}", data), threads=1)
    files[f"index/{done.digest}"] = done.index_bytes
    return files, done.digest


class Job:
    """Starts of one job on nodes that have nothing but their caches; `renew` makes the node a fresh one."""

    def __init__(self, url: str, digest: str, folder: Path, bootrun: support.Programs) -> None:
        self.url, self.digest, self.folder, self.bootrun = url, digest, folder, bootrun
        self.wheels, self.store = folder / "wheels", folder / "store"
        make_wheel(self.wheels, "small", "1.0", scripts={"small": "small:main"})
        self.store.mkdir()
        self.requirements = folder / "requirements.txt"
        self.requirements.write_text("small==1.0\n")
        self.runs = folder / "runs"
        self.script = folder / "train.py"
        self.script.write_text(TELL)
        self.cache = folder / "cache"
        self.environ: dict[str, str | None] = {
            **environ_of(folder),
            "BOOTSEER_CACHE": os.fspath(self.cache),
            "BOOTSEER_RUNTIME": os.fspath(folder / "run"),
            "OMP_NUM_THREADS": "1",
        }
        self.environ.pop("TMPDIR")
        self.setup = (
            f"pip install -q --no-index --find-links {self.wheels} -r {self.requirements}"
            f" && echo ran >> {self.runs}"
        )
        self.count = 0

    def start(self, *flags: str, caches: bool = False, status: int = 0) -> support.Run:
        self.count += 1
        words = [
            "--standalone",
            "--image",
            self.url,
            "--setup",
            self.setup,
            "--setup-input",
            f"{self.requirements}",
        ]
        words += ["--image-bind", f"{self.folder}", "--env-store", f"{self.store}", *flags]
        words += ["--log-dir", f"{self.logs}", *([] if caches else ["--no-keep-caches"]), f"{self.script}"]
        run = self.bootrun.start(*words, env=self.environ).wait(DEADLINE_S)
        assert run.status == status, run.stderr
        services_end()
        return run

    @property
    def logs(self) -> Path:
        """Of the last start."""
        return self.folder / f"logs{self.count}"

    def how(self) -> object:
        """How the last start came to its environment."""
        return setup_span(self.logs).attrs["how"]

    def installs(self) -> int:
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    def renew(self) -> None:
        self.end_mounts()

        def is_gone() -> bool:
            """What daemons that are ending still write goes as well."""
            shutil.rmtree(self.cache, ignore_errors=True)
            return not self.cache.exists()

        support.wait_until(is_gone, 30)

    def end_mounts(self) -> None:
        for each in list_trees():
            unmount_tree(each.digest, force=True)


def told(run: support.Run) -> dict[str, object]:
    (line,) = [line for line in run.stdout.splitlines() if "TOLD " in line]
    found: dict[str, object] = json.loads(line.partition("TOLD ")[2])
    return found


@pytest.fixture
def job(
    built: tuple[dict[str, bytes], str],
    bootrun: support.Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Job]:
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{tmp_path}/run")
    with FaultyHttpServer(built[0]) as server:
        made = Job(f"{server.url}@sha256:{built[1]}", built[1], tmp_path, bootrun)
        yield made
        services_end()
        made.end_mounts()


@pytest.mark.parametrize("way", ["mount", "unpack"])
def test_set_up_once_on_top_of_the_image(job: Job, way: str) -> None:
    ways = ("--env-way", f"there,{way}")
    first = told(job.start(*ways))
    target = str(first["prefix"])
    assert first["version"] == "1.0" and first["of_image"] == "image" and first["hello"] == "from the image\n"
    assert target.startswith(f"{job.cache}/image-envs/") and first["base"] == PREFIX
    assert first["executable"] == f"{target}/bin/python" and first["venv"] == target
    assert str(first["path"]).startswith(f"{target}/bin:")
    assert job.how() == "installed" and job.installs() == 1
    assert len(list(job.store.glob("keys/*/env-*.json"))) == 1

    job.renew()
    second = told(job.start(*ways))
    assert job.how() == way and job.installs() == 1, "set-up did not run again"
    same = ("version", "of_image", "prefix", "executable", "file", "path")
    assert [second[name] for name in same] == [first[name] for name in same]
    assert second["compiled"], "by the image's own interpreter, on the first node"
    assert os.path.exists(str(second["file"])) == (way == "unpack"), "a mounted one is seen by ranks alone"

    if way == "unpack":
        assert told(job.start(*ways))["version"] == "1.0"
        assert job.how() == "there"
    assert job.installs() == 1


def test_what_the_first_start_has_read_is_recorded_for_other_nodes(job: Job) -> None:
    """Without it they would fetch all of the environment before they need it."""
    text = """
import time
end_s = time.monotonic() + 60
while time.monotonic() < end_s and not any("traces" in folder[0] and folder[2] for folder in os.walk(STORE)):
    time.sleep(0.05)  # between looks, which end after 60 s
"""
    job.script.write_text(TELL + text.replace("STORE", repr(os.fspath(job.store))))
    job.start()
    assert job.how() == "installed"
    traces = [path for path in job.store.rglob("*") if "traces" in path.parts and path.is_file()]
    assert traces, sorted(job.store.rglob("*"))


@pytest.mark.parametrize(("way", "how"), [("unpack", "there"), ("mount", "mount")])
def test_on_a_node_that_was_warmed(job: Job, way: str, how: str) -> None:
    ways = ("--env-way", f"there,{way}")
    told(job.start(*ways))
    job.renew()
    bootrun, job.bootrun.prefix = job.bootrun.prefix, (BOOTSEER, "warm")
    job.start(*ways)
    job.bootrun.prefix = bootrun
    assert told(job.start(*ways))["version"] == "1.0"
    assert (job.how(), job.installs()) == (how, 1)
    assert {each.stage for each in agent_events(job.logs) if each.name == "warmed"} >= {"env"}
    shown = {each.kind for each in agent_events(job.logs) if each.name == "show"}
    assert shown == ({"begin", "end"} if way == "mount" else set())


def test_what_another_image_or_file_changes(job: Job) -> None:
    ways = ("--env-way", "there,unpack")
    make_wheel(job.wheels, "small", "2.0")
    first = told(job.start(*ways))
    job.requirements.write_text("small==2.0\n")
    second = told(job.start(*ways))
    assert (second["version"], job.how(), job.installs()) == ("2.0", "installed", 2)
    assert second["prefix"] != first["prefix"], "nothing is installed over what another job may use"
    job.requirements.write_text("small==1.0\n")
    assert told(job.start(*ways))["prefix"] == first["prefix"]
    assert (job.how(), job.installs()) == ("there", 2)


def test_what_set_up_reads_of_the_nodes_directories_decides(job: Job) -> None:
    """A script and its files lie in a folder that the image sees at the same path, beside the working folder."""
    ways = ("--env-way", "there,unpack")
    make_wheel(job.wheels, "small", "2.0")
    (job.folder / "which").write_text("small==1.0\n")
    (job.folder / "setup.sh").write_text(
        f"set -e\ncd {job.folder}\nif [ -f more.sh ]; then . ./more.sh; fi\n"
        f"pip install -q --no-index --find-links wheels $(cat which)\necho ran >> {job.runs}\n"
    )
    job.setup = f"sh {job.folder}/setup.sh"
    assert told(job.start(*ways))["version"] == "1.0"
    job.script.write_text(TELL + "# edited\n")
    assert told(job.start(*ways))["version"] == "1.0" and job.installs() == 1
    (job.folder / "which").write_text("small==2.0\n")
    assert told(job.start(*ways))["version"] == "2.0" and job.installs() == 2
    (job.folder / "more.sh").write_text("true\n")
    job.start(*ways)
    assert job.installs() == 3


def test_first_step_caches_in_an_image(job: Job) -> None:
    job.script.write_text(TELL + 'open(found["caches"] + "/aa-made", "w").write("x" * 1000)\n')
    first = told(job.start(caches=True))
    assert str(first["caches"]).startswith(f"{job.cache}/") and first["cached"] == []
    assert os.path.isfile(f"{first['caches']}/aa-made"), "they lie on the node"


def test_a_directory_and_an_interpreter_that_the_user_names(job: Job) -> None:
    target = job.folder / "mine" / "env"
    job.setup = (
        f"python3 -m venv --without-pip --system-site-packages {target} && {target}/bin/python -m pip install -q "
        f"--no-index --find-links {job.wheels} -r {job.requirements} && echo ran >> {job.runs}"
    )
    words = ("--setup-target", f"{target}", "--image-python", f"{target}/bin/python", "--env-way", "there,unpack")
    first = told(job.start(*words))
    assert (first["prefix"], first["version"], first["venv"]) == (f"{target}", "1.0", None)
    job.renew()
    shutil.rmtree(target)
    second = told(job.start(*words))
    assert (second["prefix"], job.how(), job.installs()) == (f"{target}", "unpack", 1)


def test_a_directory_as_image_is_set_up_and_not_kept(job: Job, root: str) -> None:
    """Nobody knows what is in it, so there is no key."""
    job.url = f"rootfs:{root}"
    run = job.start()
    assert told(run)["version"] == "1.0" and "its result is not stored" in run.stderr
    assert "without a digest of its content" in run.stderr
    assert not list(job.store.glob("keys/*"))


def test_set_up_that_fails_in_the_image(job: Job) -> None:
    job.setup = "echo here is $(cat /opt/data/hello.txt); exit 3"
    run = job.start(status=1)
    assert "here is from the image" in run.stdout + run.stderr
    assert "ended with status 3" in run.stderr
    # What was half made is of no use to the next start.
    job.setup = f"pip install -q --no-index --find-links {job.wheels} small && echo ran >> {job.runs}"
    assert told(job.start())["version"] == "1.0"


def test_an_image_that_is_lost_shows_its_environment_again(job: Job) -> None:
    """Ranks of the next attempt find the mounted environment in the image that was opened anew."""
    told(job.start("--env-way", "there,mount"))
    job.renew()
    job.script.write_text(
        "import os, signal, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    print('UP', flush=True)\n"
        "    signal.pause()\n" + TELL
    )
    job.count += 1
    words = ["--standalone", "--image", job.url, "--setup", job.setup, "--setup-input", f"{job.requirements}"]
    words += [
        "--image-bind",
        f"{job.folder}",
        "--env-store",
        f"{job.store}",
        "--no-keep-caches",
        "--env-way",
        "mount",
    ]
    words += ["--max-restarts", "1", "--restart-backoff", "0", "--log-dir", f"{job.logs}", f"{job.script}"]
    program = job.bootrun.start(*words, env=job.environ)
    support.wait_until(lambda: "UP" in program.stdout, DEADLINE_S)
    assert unmount_tree(job.digest, force=True)
    support.wait_until(lambda: "reopening the image" in program.stderr, DEADLINE_S)
    (rank,) = [
        each
        for each in support.marked_processes(os.environ[support.MARK])
        if "train.py" in each.command
        and "bootrun" not in each.command
        and "python" in each.command
        and "-m" not in each.command
    ]
    os.kill(rank.pid, 9)
    run = program.wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert told(run)["version"] == "1.0"


@pytest.mark.parametrize(("who", "is_known"), [("service", True), ("sandbox", True), ("sandbox", False)])
def test_an_image_that_is_lost_while_set_up_runs(job: Job, who: str, is_known: bool) -> None:
    """What is left of set-up runs in the image that was opened anew, from its beginning."""
    there, go = job.folder / "there", job.folder / "go"
    install, job.setup = job.setup, f"echo x >> {there}; while [ ! -e {go} ]; do :; done"
    job.count += 1
    words = ["--standalone", "--image", job.url, "--setup", job.setup, "--setup", install]
    words += ["--image-bind", f"{job.folder}", "--no-keep-caches", "--log-dir", f"{job.logs}", f"{job.script}"]
    program = job.bootrun.start(*words, env=job.environ)
    support.wait_until(there.exists, DEADLINE_S)
    services = [
        each
        for each in support.marked_processes(os.environ[support.MARK])
        if "bootseer.mounts.sandbox.service" in each.command
    ]
    (service,) = [each for each in services if each.ppid == program.pid]
    (sandbox,) = [each for each in services if each.ppid == service.pid]
    os.kill((service if who == "service" else sandbox).pid, 9)
    if is_known:
        support.wait_until(lambda: "reopening the image" in program.stderr, DEADLINE_S)
    go.touch()
    run = program.wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert told(run)["version"] == "1.0" and job.installs() == 1
    assert run.stderr.count("set-up is run again") == 1
    assert len(there.read_text().splitlines()) == 2


def test_no_set_up_into_directories_that_images_have(job: Job) -> None:
    run = job.start("--setup-target", "/opt/env", status=2)
    assert "--setup-target /opt/env" in run.stderr and "below one of your own" in run.stderr
