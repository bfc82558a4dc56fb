"""Runs the code blocks of README.md and docs/guide as a user would: in a temporary folder, in the page's order.

Each test names the blocks that it runs. `SUBSTITUTES` puts folders, loopback and few ranks in the place of stores,
hosts and machines. The last tests compare these names with the pages: each block is run, or marked with a reason.
"""

from __future__ import annotations

import configparser
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.report_job import Plan, Planted, write_job
from bootseer import job_file
from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree
from launcher.warm.jobs import parse_job
from tests import support
from tests.docs_blocks import TOP, Block, page_names, parse_page, read_page
from tests.integration.captured_envs import environ_of, make_venv
from tests.integration.image_roots import PREFIX, add_pip, libraries, make_root
from tests.integration.mounted_trees import need_mounts
from tests.integration.mounting import is_mounted, need_fuse
from tests.integration.setup_jobs import services_end
from tests.made_wheels import make_wheel

pytestmark = pytest.mark.timeout(180)

PAGES = {name: read_page(name) for name in page_names()}
DEADLINE_S = 120.0

# In each block, in this order; HERE is the folder of the test, PORT a free port.
SUBSTITUTES = {
    # stores are directories
    "hdfs://namenode": "HERE/store",
    "s3://bucket": "HERE/store",
    "docker://registry.example.com/team/train:v3": "HERE/image-root",
    "docker://python:3.11": "HERE/small-root",
    "--env-store URL": "--env-store HERE/store/environments",
    # several nodes are processes on this machine; few ranks
    "node0:29400": "127.0.0.1:PORT",
    "head:29400": "127.0.0.1:PORT",
    "29517": "PORT",
    "--pair NODE": "--pair 127.0.0.1:PORT",
    "--steps 60": "--steps 60 --width 32 --layers 1 --batch 2",
    "--nnodes 4": "--nnodes 2",
    "--nnodes 24": "--nnodes 1",
    "--nproc-per-node 8": "--nproc-per-node 2",
    '"--nproc-per-node", "8"': '"--nproc-per-node", "2"',
    # paths of a machine are in the folder
    " /data": " HERE/data",
    '"/data': '"HERE/data',
    " /checkpoints": " HERE/checkpoints",
    '"/checkpoints': '"HERE/checkpoints',
    " /job": " HERE/job",
    " /logs": " HERE/logs",
    "/mnt/ckpt": "HERE/mnt/ckpt",
    "/mnt/train": "HERE/mnt/train",
    "/etc/bootseer": "HERE/etc/bootseer",
    "/opt/bootseer/bin/": "",
    "/home/ann/proj": "HERE",
    "/home/ann/venv": "HERE/venv",
    # programs of a machine
    "sudo ": "",
    "| jq .": "| python -m json.tool",
}
# What a job prints that differs between runs and machines.
UNSTABLE = (
    (r"\b[0-9a-f]{4,}\.\.+", "DIGEST"),
    (r"\bnot found: [0-9a-f]+\S*", "not found: DIGEST"),
    (r"(?:[\w.${}-]*/)+(?=[\w.-])", ""),  # directories
    (r"\b(?:hrtimer_|do_)nanosleep\b|\bfutex_\w+", "KERNEL_FUNCTION"),
    (r"longest stage: \w+ [\d.]+ m?s(?: \(rank \d+\))?", "longest stage: STAGE"),
    (r"\brun7_\w+", "RUN"),
    (rf"\b(?:n1|vm|node\d+|{re.escape(socket.gethostname())})\b", "HOST"),
    (r"\d\d\d\d-\d\d-\d\d", "DATE"),
    (r"\d[\d,.:]*", "#"),
    (r"# (?:[mu]?s|min|[KMG]iB)\b", "# UNIT"),
    (r"\s+", " "),
)
STEPS = """
import os, sys, time
import bootseer
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
for step in range(3):
    bootseer.heartbeat(step)
"""

Claim = tuple[str, int]  # page and line
CLAIMS: dict[Claim, str] = {}  # the test that runs a block


def runs(page: str, *starts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Name the blocks of a page that a test runs, by the beginnings of their first lines."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        for start in starts:
            block = find(page, start)
            assert (page, block.line) not in CLAIMS, (page, start)
            CLAIMS[page, block.line] = test.__name__
        return test

    return decorate


def find(page: str, start: str) -> Block:
    """The one block of a page that begins so."""
    found, *more = [block for block in PAGES[page].blocks if block.start.startswith(start)]
    assert not more, f"{page}: {start} begins several blocks"
    assert not found.reason, f"{page}:{found.line} is marked as not run"
    return found


class Command(NamedTuple):
    """A command of a block, as it was run, and its end."""

    text: str
    status: int
    output: str  # stdout and stderr


class User:
    """A user's folder and shell; `run` runs blocks in it."""

    def __init__(self, above: Path, program: support.Programs, claimed: set[Claim]) -> None:
        self.folder = folder = above / "work"
        folder.mkdir()
        self.left = claimed
        self.port = support.find_free_port()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._program = program
        self._count = 0
        self.environ: dict[str, str | None] = {
            **environ_of(above),
            "PATH": f"{self.bin}:{support.SCRIPTS}:{os.environ['PATH']}",
            "BOOTSEER_CACHE": os.fspath(above / "cache"),
            "BOOTSEER_RUNTIME": os.fspath(above / "run"),
            "OMP_NUM_THREADS": "1",
        }
        (folder / "train.py").write_text(STEPS)
        (folder / "store").mkdir(mode=0o755)

    def block(self, page: str, start: str) -> str:
        """The text of a block, which counts as run."""
        block = find(page, start)
        self.left.discard((page, block.line))
        return block.text

    def at_home(self, text: str, more: Mapping[str, str] | None = None) -> str:
        """The text with substitutes; those of `more` come first."""
        for old, new in {**(more or {}), **SUBSTITUTES}.items():
            text = text.replace(old, new)
        return text.replace("HERE", os.fspath(self.folder)).replace("PORT", str(self.port))

    def run(
        self,
        page: str,
        start: str,
        more: Mapping[str, str] | None = None,
        *,
        statuses: Mapping[int, int] | None = None,
    ) -> list[Command]:
        """Run the commands of a block one after the other in one shell; each has to end with 0, or its status."""
        return self.shell(self.at_home(self.block(page, start), more), statuses)

    def shell(self, text: str, statuses: Mapping[int, int] | None = None) -> list[Command]:
        """Run commands, a line each, in one shell."""
        commands = split(text)
        self._count += 1
        out = self.folder / f"shell{self._count}"
        out.mkdir()
        script = "".join(
            f"{{ {command}\n}} > {out}/{number} 2>&1\necho $? > {out}/{number}.status\n"
            for number, command in enumerate(commands)
        )
        done = self._program(
            "/bin/bash", "-c", script, env=self.environ, cwd=str(self.folder), deadline_s=DEADLINE_S
        )
        assert done.status == 0, done.stderr
        found = [
            Command(command, int((out / f"{number}.status").read_text()), (out / f"{number}").read_text())
            for number, command in enumerate(commands)
        ]
        for number, command in enumerate(found):
            assert command.status == (statuses or {}).get(number, 0), "\n".join(map(str, command))
        return found

    def start(self, text: str) -> support.Program:
        """Start one command that goes on."""
        return self._program.start("/bin/bash", "-c", f"exec {text}", env=self.environ, cwd=str(self.folder))

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def stand_in(self, name: str, text: str) -> None:
        """A program that is found first."""
        self.write(f"bin/{name}", text).chmod(0o755)

    def shows(self, page: str, start: str, output: str, more: Mapping[str, str] | None = None) -> None:
        """Compare the lines that a page prints with the output: each is there, in this order."""
        rest = stable(output)
        text = self.block(page, start)
        for old, new in (more or {}).items():
            text = text.replace(old, new)
        for line in text.splitlines():
            wanted = re.escape(stable(line)).replace(r"\.\.\.", ".*?")
            found = re.search(wanted, rest)
            assert found, f"{page} prints\n  {line}\n  as {stable(line)}\nwhich is not in\n{output}\n  as {rest}"
            rest = rest[found.end() :]


def split(text: str) -> list[str]:
    """The commands of a block: lines, without the prompt, joined where they end with a backslash."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.strip() and not line.startswith("#")]


def stable(text: str) -> str:
    for pattern, new in UNSTABLE:
        text = re.sub(pattern, new, text)
    return text.strip()


@pytest.fixture
def user(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    program: support.Programs,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[User]:
    claimed = {claim for claim, name in CLAIMS.items() if name == request.function.__name__}
    found = User(tmp_path, program, claimed)
    monkeypatch.setenv("BOOTSEER_RUNTIME", str(found.environ["BOOTSEER_RUNTIME"]))
    yield found
    services_end()
    for tree in list_trees():
        unmount_tree(tree.digest, force=True)
    assert not found.left, f"named, and not run: {found.left}"


# ---- what users have -----------------------------------------------------------------------------------------


def install(user: User) -> None:
    """`pip install '.[EXTRAS]'` of a clone would need a package index: a stand-in looks the extras up."""
    user.write("clone.toml", Path(TOP, "pyproject.toml").read_text())
    user.stand_in(
        "pip",
        f"#!{sys.executable}\nimport re, sys, tomllib\n"
        f"known = tomllib.load(open({os.fspath(user.folder / 'clone.toml')!r}, 'rb'))['project']\n"
        "names = re.fullmatch(r'install \\.\\[([a-z,]+)\\]', ' '.join(sys.argv[1:]))[1].split(',')\n"
        "sys.exit(not set(names) <= set(known['optional-dependencies']))\n",
    )


def requirements(user: User) -> None:
    """A virtual environment, active, whose pip installs `small` from a directory of wheels; requirements.txt."""
    venv = make_venv(user.folder / "venv")
    make_wheel(user.folder / "wheels", "small", "1.0")
    make_wheel(user.folder / "wheels", "small", "1.1")
    user.write("venv/bin/pip", f'#!/bin/sh\nexec {sys.executable} -m pip --python {venv}/bin/python "$@"\n')
    (user.folder / "venv/bin/pip").chmod(0o755)
    user.write("requirements.txt", "small==1.0\n")
    user.environ |= {
        "PYTHON_EXEC": f"{venv}/bin/python",
        "PIP_FIND_LINKS": os.fspath(user.folder / "wheels"),
    }


def job_file_of(user: User, page: str, start: str) -> None:
    """bootseer.toml, as a page has it."""
    user.write("bootseer.toml", user.at_home(find(page, start).text)).chmod(0o644)


# ---- the pages' blocks ---------------------------------------------------------------------------------------


@runs("README.md", ". .venv/bin/activate", "bootrun: 2 ranks on 1 node started")
@pytest.mark.slow
def test_quick_start(user: User) -> None:
    user.write(".venv/bin/activate", f"PATH={support.SCRIPTS}:$PATH\n")
    (user.folder / "examples").symlink_to(os.path.join(TOP, "examples"))
    user.environ.pop("OMP_NUM_THREADS")
    *_, job = user.run("README.md", ". .venv/bin/activate")
    # Ranks write beside bootrun, and a line of one may come before or after a line of the other.
    log = sorted(job.output.splitlines(), key=lambda line: "final loss" in line)
    user.shows("README.md", "bootrun: 2 ranks on 1 node started", "\n".join(log))
    (report,) = user.shell("bootseer report logs/first")
    assert "Critical path" in report.output


@runs("README.md", "bootrun --standalone --nproc-per-node 8 train.py")
def test_one_node(user: User) -> None:
    (job,) = user.run("README.md", "bootrun --standalone")
    assert "rank 1 of 2" in job.output


@runs("README.md", "bootrun --nnodes 4 --nproc-per-node 8 --rdzv-backend")
@runs("running.md", "bootrun --nnodes 4 --nproc-per-node 8 --rdzv-backend", "(umask 077;")
def test_several_nodes(user: User) -> None:
    command = user.at_home(user.block("README.md", "bootrun --nnodes 4"))
    assert command == user.at_home(user.block("running.md", "bootrun --nnodes 4"))
    # With the secret, which the last block adds.
    secret, with_secret = split(user.at_home(user.block("running.md", "(umask 077;")))
    user.shell(secret)
    head, _, more = with_secret.partition(" ...")
    words = command.replace("bootrun --nnodes 2", head)
    assert not more and words != command
    text = f"{words} & {words}; first=$?; wait $! && exit $first"
    (nodes,) = user.shell(f"({text})")
    assert [nodes.output.count(f"rank {rank} of 4") for rank in range(4)] == [1, 1, 1, 1]
    assert "secret" not in nodes.output


@runs("images.md", "pip install '.[image]'", "bootseer image mount")
@runs("README.md", "bootseer keys make")
@runs("environments.md", "bootrun --image hdfs://namenode/images/train-v3")
@runs("warm.md", "bootseer warm --image")
@pytest.mark.system
@pytest.mark.slow
def test_images(user: User) -> None:
    need_mounts()
    root = user.folder / "image-root"
    version = make_root(os.fspath(root))
    add_pip(os.fspath(root), version)
    uname = shutil.which("uname") or ""
    for path in ("/bin/uname", *libraries([uname])):
        place = user.write(f"small-root{path}", "")
        shutil.copy2(uname if path == "/bin/uname" else path, place)
    user.write("train.py", "import sys; print('of', sys.prefix)")
    install(user)
    *_, job = user.run("images.md", "pip install")
    assert job.output.count(f"of {PREFIX}\n") == 2, job.output
    for tree in list_trees():  # which serve the job without the folder's place
        unmount_tree(tree.digest, force=True)
    (user.folder / "mnt" / "train").mkdir(parents=True)
    *_, state = user.run("images.md", "bootseer image mount")
    assert state.output in ("mounted\n", "fetching\n", "complete\n")
    user.shell("bootseer image umount mnt/train")
    *_, job = user.run("README.md", "bootseer keys make", statuses={0: 1})  # there is a key
    assert len(re.findall("^Linux ", job.output, re.MULTILINE)) == 2, job.output
    requirements(user)
    user.environ.pop("PYTHON_EXEC")
    user.write("train.py", "import small, sys; print('small', small.VERSION, sys.prefix)")
    (job,) = user.run("environments.md", "bootrun --image")
    assert "small 1.0" in job.output and "image-envs" in job.output
    services_end()
    job_file_of(user, "README.md", "[setup]")
    image, env, both = user.run("warm.md", "bootseer warm --image")
    assert "image: " in image.output and "env: " in env.output and "env: " in both.output
    (user.folder / "bootseer.toml").unlink()


@runs("environments.md", "pip install '.[env]'", "bootseer env snapshot", "not found: ", "bootrun --env-store URL")
@runs("operating.md", "bootseer image gc")
@pytest.mark.slow
def test_environments(user: User) -> None:
    requirements(user)
    make_wheel(user.folder / "base", "numpy", "2.1.0")
    make_wheel(user.folder / "base", "numpy", "2.2.0")
    user.write("requirements.txt", "-c constraints.txt\nsmall==1.0\n")
    user.write("constraints.txt", "small==1.0\n")
    user.write("train.py", "import small; print('small', small.VERSION)")
    user.shell("venv/bin/pip install -q --find-links base numpy==2.1.0")
    install(user)
    *_, job = user.run("environments.md", "pip install '.[env]'")
    assert job.output.count("small 1.0") == 2
    services_end()
    job_file_of(user, "environments.md", "[setup]")
    (again,) = user.run("environments.md", "bootrun --env-store URL")
    assert "small 1.0" in again.output
    services_end()
    (listed,) = user.shell("bootseer env list --json --env-store store/environments")
    ((key,),) = [[each["key"] for each in json.loads(listed.output)["environments"]]]
    words = {" explain ...": " explain", " KEY ": f" {key} "}
    _, listed, explained, restored, verified, collected, kept = user.run(
        "environments.md", "bootseer env snapshot", words, statuses={6: 1}
    )
    assert "not deleted: it was used or stored within 2 h" in kept.output
    assert listed.output.startswith(key[:16]) and f"found: {key}" in explained.output
    assert "has the environment" in restored.output and "1 of 1 blocks correct" in verified.output
    assert "0 B would be deleted" in collected.output
    user.write("requirements.txt", "-c constraints.txt\nsmall\n")
    shutil.rmtree(user.folder / "venv/lib")
    make_venv(user.folder / "venv")
    user.shell("venv/bin/pip install -q --find-links base numpy==2.2.0")
    (explained,) = user.shell("bootseer env explain")
    user.shows("environments.md", "not found: ", explained.output)
    images, *environments = split(user.at_home(user.block("operating.md", "bootseer image gc")))
    user.shell("mkdir -p image-source/bin\nbootseer image build image-source store/images/train-v3")
    user.shell("\n".join([images, *environments]))


@runs("environments.md", "$ bootrun ... train.py        # first")
@pytest.mark.slow
def test_starts_with_an_environment(user: User) -> None:
    need_mounts()
    requirements(user)
    user.write(
        "train.py",
        "import os, small, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n",
    )
    start = (
        "bootrun --standalone --setup 'pip install -r requirements.txt' --setup-input requirements.txt"
        " --env-store store/environments --no-keep-caches"
    )
    about = re.compile("environment (is stored|is already in place|was mounted|was restored)")
    as_new = "rm -r venv ../cache; cp -a new venv"
    user.shell("cp -a venv new")
    block = user.block("environments.md", "$ bootrun ... train.py        # first")
    output = []
    for line, more in zip(
        [line for line in block.splitlines() if line.startswith("$ ")],
        ["", "", "--env-way mount", "--env-way there,unpack"],
        strict=True,
    ):
        if more:
            user.shell(as_new)
        job = user.start(f"{start} {more} train.py 2>&1")
        support.wait_until(lambda job=job: about.search(job.stdout), 90, "the line about the environment")
        (user.folder / "go").touch()
        job.wait()
        (user.folder / "go").unlink()
        output += [line, job.stdout]
    user.shows(
        "environments.md",
        "$ bootrun ... train.py        # first",
        "\n".join(output),
        {"hdfs://namenode/": "store/", " MB": " kB"},
    )


@runs("operating.md", "export BOOTSEER_TUNING")
def test_limits_of_a_cluster(user: User) -> None:
    user.write("train.py", "import os; print('limits:', os.environ['BOOTSEER_TUNING'])")
    words = user.block("operating.md", "export BOOTSEER_TUNING")
    *_, done = user.shell(f"{words}\nbootrun --standalone train.py")
    assert "limits: storage.timeout_s=120.0 storage.max_requests=16" in done.output


@runs("operating.md", "bootseer keys make --name")
def test_keys(user: User) -> None:
    *_, listed = user.run("operating.md", "bootseer keys make --name")
    assert "ci@example.com" in listed.output


LIBRARIES = """
import os, sys, types
import torch, torch.distributed as dist
class Trainer:
    def __init__(self, *args, callbacks):
        assert len(callbacks) == 1
class Base: pass
for name in ("lightning", "lightning.pytorch", "transformers"):
    sys.modules[name] = made = types.ModuleType(name)
    made.Trainer, made.Callback, made.TrainerCallback = Trainer, Base, Base
sys.modules["huggingface_hub"] = types.ModuleType("huggingface_hub")
lightning, transformers = sys.modules["lightning"], sys.modules["transformers"]
dist.init_process_group("gloo")
device_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
new_state = dict
def rank_zero_only(): pass
def load_dotenv(): os.environ["HF_HOME"] = "here"
"""


@runs("checkpoints.md", "pip install", "bootseer ckpt stripe", "bootrun --nproc-per-node", "path = os.environ")
@runs("fork.md", "load_dotenv()", "rank_zero_only.rank")
@runs("running.md", "bootseer.layout(", "import bootseer.callbacks")
@pytest.mark.slow
def test_checkpoints_and_python_blocks(user: User) -> None:
    install(user)
    user.run("checkpoints.md", "pip install")
    user.write("model/config.json", '{"layers": 2}')
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (user.folder / "model/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with zipfile.ZipFile(user.folder / "model/state.pt", "w") as file:  # as torch.save writes it
        file.writestr("state/data.pkl", pickle.dumps({"step": 1000}, protocol=2))
        file.writestr("state/version", "3\n")
    *_, listed, verified, plain, config = user.run("checkpoints.md", "bootseer ckpt stripe")
    assert "step 1000: 3 files" in listed.output and "3 files: 346 B right, 0 faults" in verified.output
    assert "3 files, 346 B" in plain.output and json.loads(config.output) == {"layers": 2}
    python = [
        user.block("fork.md", "load_dotenv()"),
        user.block("fork.md", "rank_zero_only.rank"),
        user.block("running.md", "import bootseer.callbacks"),
        user.block("running.md", "bootseer.layout("),
        user.block("checkpoints.md", "path = os.environ"),
    ]
    end = "print('state', state, rank_zero_only.rank, flush=True)\noptimizer.step()\n"
    user.write("train.py", "\n".join([LIBRARIES, *python, end]))
    (job,) = user.run("checkpoints.md", "bootrun --nproc-per-node", {})
    assert [job.output.count(f"state {{'step': 1000}} {rank}") for rank in range(2)] == [1, 1], job.output


@runs("mount.md", "bootseer ckpt mount")
@pytest.mark.system
def test_checkpoint_mounts(user: User) -> None:
    need_fuse()
    (user.folder / "mnt/ckpt").mkdir(parents=True)
    user.write("model/weights.bin", "weights")
    user.shell("bootseer ckpt stripe model store/run1/ckpt --step 1")
    read, write, end = split(user.at_home(user.block("mount.md", "bootseer ckpt mount")))
    mount = os.fspath(user.folder / "mnt/ckpt")
    for command in (read, write):
        program = user.start(command)
        support.wait_until(lambda: is_mounted(mount), 30, "the mount")
        (shown,) = user.shell("cat mnt/ckpt/weights.bin")
        assert shown.output == "weights"
        if command is write:
            user.shell(
                "mkdir mnt/ckpt/tmp-2\necho more > mnt/ckpt/tmp-2/weights.bin\nmv mnt/ckpt/tmp-2 mnt/ckpt/step-2"
            )
        user.shell(end)
        assert program.wait().status == 0
    (listed,) = user.shell("bootseer ckpt ls store/run1/ckpt")
    assert "step 2: 1 file" in listed.output


@runs("checks.md", "bootseer check ", "#!/bin/sh")
def test_checks(user: User) -> None:
    for name in ("data", "checkpoints"):
        (user.folder / name).mkdir()
    text = user.at_home(user.block("checks.md", "bootseer check "))
    node, paths, only, pairs, job = split(text)
    # What is wrong with this machine is found, too. The page's comment would hide the rest of the line.
    user.shell(f"{node.partition('#')[0]} || test $? = 3")
    (found,) = user.shell(paths, {0: 3})
    assert f"storage {user.folder}/checkpoints" in found.output and "limit 8 GPUs" in found.output
    (found,) = user.shell(f"{only} || test $? = 3")
    assert {each["check"] for each in json.loads(found.output)["findings"]} == {"mounts", "kernel-log"}
    secret = user.write("job.secret", "a secret of 16 bytes")
    secret.chmod(0o600)
    user.environ["BOOTSEER_SECRET_FILE"] = os.fspath(secret)
    listens, _, other = pairs.partition("#")
    listening = user.start(listens)
    support.wait_until(lambda: str(user.port) in listening.stdout + listening.stderr, 10, "it listens")
    (found,) = user.shell(other.partition(": ")[2])
    assert "pair" in found.output and "fail" not in found.output
    listening.signal(15)
    listening.wait()
    del user.environ["BOOTSEER_SECRET_FILE"]
    (found,) = user.shell(job)
    assert "rank 1 of 2" in found.output
    user.write("etc/bootseer/checks/fabric.sh", user.block("checks.md", "#!/bin/sh")).chmod(0o755)
    job_file_of(user, "checks.md", "[check]")
    (found,) = user.shell("bootseer check", {0: 3})
    assert "own:fabric.sh ib0: slow (80 Gbit/s, limit 100 Gbit/s)" in found.output
    assert "network ib0: no such NIC" in found.output


@runs("rules.md", "# bootseer.toml", "bootrun: error: rule 'loss'")
def test_rules(user: User) -> None:
    user.write("bootseer.toml", user.block("rules.md", "# bootseer.toml")).chmod(0o644)
    user.write(
        "train.py",
        """
import os, time
for step in range(500, 513):
    print(f"step {step} loss={'nan' if step == 512 and os.environ['RANK'] == '3' else 0.5} lr=0.0003", flush=True)
time.sleep(20)
""",
    )
    (job,) = user.shell("bootrun --standalone --nproc-per-node 4 --tee 3 --log-dir logs train.py", {0: 1})
    user.shows("rules.md", "bootrun: error: rule 'loss'", job.output)


@runs("fork.md", "bootrun: warning: ranks are exec'd")
def test_reasons_for_execd_ranks(user: User) -> None:
    (job,) = user.shell("bootrun --standalone --fork-ranks on --no-python true")
    user.shows("fork.md", "bootrun: warning: ranks are exec'd", job.output, {"REASON": "--no-python"})


@runs("running.md", "failure 0 of job run7", "$ bootseer status")
def test_failure_records_and_status(user: User) -> None:
    user.write(
        "train.py",
        """
import os, time
import bootseer
for step in range(1000, 100_000):
    bootseer.heartbeat(step)
    time.sleep(0.02)
    if step == 1010 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {}["x"]
""",
    )
    job = user.start(
        "bootrun --nproc-per-node 2 --max-restarts 3 --log-dir logs "
        f"--rdzv-backend c10d --rdzv-endpoint localhost:{user.port} --rdzv-id run7 train.py"
    )
    support.wait_until(lambda: list((user.folder / "logs").glob("*/failure-0.txt")), 30, "the record")
    (record,) = (user.folder / "logs").glob("*/failure-0.txt")
    support.wait_until(lambda: "together" in record.read_text(), 30)

    def status() -> str:
        (shown,) = user.shell(split(user.block("running.md", "$ bootseer status"))[0] + " || test $? = 1")
        return shown.output

    with_cores = re.compile(r"running .* ago +[0-9.]+ ")  # known from the second look on
    shown = support.wait_until(lambda: found if with_cores.search(found := status()) else "", 30, "the status")
    job.signal(15)
    job.wait()
    user.shows("running.md", "failure 0 of job run7", record.read_text())
    user.shows("running.md", "$ bootseer status", "$ bootseer status\n" + shown)


@runs("running.md", "bootrun: error: the job hangs", "the job hangs (all-idle)")
@pytest.mark.slow
def test_hangs(user: User) -> None:
    user.write(
        "train.py",
        """
import threading, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
lock = threading.Lock()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def wait_for_lock(step):
    with lock:
        time.sleep(0.02)
    if step == 40 and dist.get_rank() == 1:
        lock.acquire()
        lock.acquire()

for step in range(1000):
    wait_for_lock(step)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
""",
    )
    hang = "bootrun --standalone --nproc-per-node 2 --hang-least 2 --log-dir logs"
    job = user.start(f"{hang} train.py")
    support.wait_until(lambda: "the job hangs" in job.stderr, 60)
    job.signal(15)
    job.wait()
    user.shows("running.md", "bootrun: error: the job hangs", job.stderr)
    user.write(
        "train.py",
        """import time, torch, bootseer
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def load_batch(step):
    time.sleep(1000 if step == 41 and rank == 1 else 0.02)

gradients = torch.ones(8)
for step in range(1000):
    load_batch(step)
    dist.all_reduce(gradients)
    bootseer.heartbeat(step)
""",
    )
    job = user.start(f"{hang}/traced --trace-collectives train.py")
    support.wait_until(lambda: list((user.folder / "logs/traced").glob("*/standstill-0.txt")), 60)
    (report,) = (user.folder / "logs/traced").glob("*/standstill-0.txt")
    support.wait_until(lambda: "load_batch" in report.read_text(), 10)
    job.signal(15)
    job.wait()
    user.shows("running.md", "the job hangs (all-idle)", report.read_text())


@runs("running.md", "bootrun --nnodes 24")
@support.needs_program("git")
def test_escalation(user: User) -> None:
    user.write("train.py", "raise ZeroDivisionError(open('tried', 'a').write('x') and open('tried').read())")
    user.write("replay.sh", "#!/bin/sh\ntrue\n").chmod(0o755)
    git = "git -c user.email=a@b -c user.name=a"
    user.shell(
        f"mkdir job\n{git} -C job init -q\n{git} -C job commit -q --allow-empty -m x\n{git} -C job tag good"
    )
    words = {" ...": " --standalone --restart-backoff 0 --log-dir logs train.py"}
    (job,) = user.run("running.md", "bootrun --nnodes 24", words, statuses={0: 1})
    assert "rollback on " in job.output and "it succeeded" in job.output


@runs("report.md", "bootseer report /logs/run1", "env on node0017")
@runs("running.md", "bootseer report logs/job7")
def test_reports(user: User) -> None:
    user.shell(
        "".join(
            f"bootrun --standalone --nproc-per-node 2 --log-dir {name} train.py\n"
            for name in ("logs/run1", "logs/before", "logs/after", "logs/job7")
        )
    )
    user.run("report.md", "bootseer report /logs/run1")
    user.run("running.md", "bootseer report logs/job7")
    assert all((user.folder / name).stat().st_size for name in ("run1.html", "job7.html", "starts.parquet"))
    planted = (Planted("env", 36.0, 17), Planted("import", 12.0, 12, 5))
    job = write_job(os.fspath(user.folder / "made"), Plan(nodes=20, ranks=8, planted=planted, run_id="made"))
    (report,) = user.shell(f"bootseer report {job}")
    user.shows("report.md", "env on node0017", report.output)


CURL = """
import sys, urllib.request
*_, url = sys.argv
headers = dict(sys.argv[2].split(": ", 1) for _ in sys.argv[1:2] if sys.argv[1] == "-H")
print(urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20).read().decode())
"""


@runs("dashboard.md", "bootseer serve", "head -c 32 /dev/urandom")
def test_dashboard(user: User) -> None:
    """Servers of a block run in the background until the test ends them."""
    user.stand_in("curl", f"#!{sys.executable}{CURL}")
    ready = "& echo $! > pid; until curl http://127.0.0.1:PORT/healthz; do sleep 0.05; done"
    words = {
        "bootseer serve ": f"bootseer serve PORT {ready}",
        "--dashboard on": "--dashboard PORT",
        " 8 ": " 2 ",
    }
    served, job = user.run("dashboard.md", "bootseer serve", words)
    assert f"http://127.0.0.1:{user.port}/" in served.output
    assert "rank 1 of 2" in job.output
    mark = os.environ[support.MARK]

    def servers() -> list[str]:
        return [each.command for each in support.marked_processes(mark)]

    support.wait_until(lambda: len(servers()) == 1, 20, "the end of that of the job, which shares the other one")
    user.shell("kill $(cat pid)")
    user.port = support.find_free_port()
    words = {
        ":8484 --token-file token": f"127.0.0.1:PORT --token-file token {ready}",
        "node-a:8484": "127.0.0.1:PORT",
    }
    *_, answer = user.run("dashboard.md", "head -c 32", words)
    assert '{"jobs":[' in answer.output
    user.shell("kill $(cat pid)")
    support.wait_until(lambda: not servers(), 20, "their ends")


@runs("warm.md", "bootseer warm --jobs")
@runs("operating.md", "[Service]")
def test_warm_daemon(user: User) -> None:
    unit = configparser.ConfigParser()
    unit.read_string(user.block("operating.md", "[Service]"))
    command = unit["Service"]["ExecStart"]
    assert command == "/opt/bootseer/bin/" + user.block("warm.md", "bootseer warm --jobs")
    user.write("etc/bootseer/jobs/job.toml", user.at_home(find("warm.md", "[job]").text)).chmod(0o644)
    user.shell("mkdir -p image-source/bin\nbootseer image build image-source store/images/train-v3")
    user.write("venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n').chmod(0o755)
    daemon = user.start(user.at_home(command))

    def status() -> str:
        (shown,) = user.shell("bootseer warm --status || true")
        return shown.output

    support.wait_until(
        lambda: re.search("job.toml: image (cached|unpacked)", status()), 30, "an image that is warmed"
    )
    daemon.signal(15)
    assert daemon.wait().status == 0


# ---- all blocks ----------------------------------------------------------------------------------------------


def settings() -> list[Block]:
    return [block for page in PAGES.values() for block in page.blocks if block.is_toml and not block.reason]


@pytest.mark.parametrize("block", settings(), ids=lambda block: f"{block.page}-{block.line}")
def test_settings_are_accepted(block: Block) -> None:
    """By the reader of bootrun and bootseer."""
    data = block.text.encode()
    if "job" in tomllib.loads(block.text):
        assert parse_job(data, "bootseer.toml").settings
    else:
        assert job_file.parse(data, "bootseer.toml")


def test_each_block_is_run_or_marked() -> None:
    run = {*CLAIMS, *((block.page, block.line) for block in settings())}
    blocks = [block for page in PAGES.values() for block in page.blocks]
    assert len(blocks) > 40
    left = [
        f"{block.page}:{block.line}: {block.start}"
        for block in blocks
        if not block.reason and (block.page, block.line) not in run
    ]
    assert not left, "run these blocks in a test, or mark them `<!-- not run: REASON -->`"


def test_each_mark_has_its_block() -> None:
    assert not {name: page.idle_marks for name, page in PAGES.items() if page.idle_marks}


def test_blocks_and_marks_are_found() -> None:
    mark = "<!-- not run: of the\nmoon -->\n"
    page = parse_page(
        "x", f"a\n\n    b \\\n      c\n\n    d\ne\n{mark}\n```\nf\n```\n\n{mark}g\n\n```toml\n[h]\ni=1\n```\n"
    )
    assert [(block.line, block.text, block.reason) for block in page.blocks] == [
        (3, "b \\\n  c\n\nd", ""),
        (11, "f", "of the moon"),
        (19, "[h]\ni=1", ""),
    ]
    assert [block.is_toml for block in page.blocks] == [False, False, True]
    assert page.idle_marks == [15]
