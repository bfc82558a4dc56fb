"""`bootrun --image`: ranks in a root file system with a Python of its own, through the real bootrun."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.writing.writer import write_version
from bootseer.events import read_events
from bootseer.mounts.sandbox import enter
from bootseer.mounts.tree_daemon.mount import unmount_tree
from bootseer.storage.local.store import LocalStore
from bootseer.tree.builder.building import Progress, SourceContents, build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.builder.packing import Packer
from bootseer.tree.index import Config
from launcher.base.loop import Loop
from launcher.monitor.samples.stack_collector import StackCollector
from tests import support
from tests.integration.image_roots import find_interpreter, make_root
from tests.integration.mounted_trees import need_mounts
from tests.integration.mounting import need_fuse
from tests.integration.watched_ranks import SeenRank, collect, find_ranks
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of mounts: needs root"),
]

NODES = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint")
# Tells what a rank sees; written to the working directory.
TELL = """
import json, os, sys
def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return error.strerror
fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[name] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass
with open("tell-" + os.environ["RANK"] + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w") as file:
    json.dump({
        "version": list(sys.version_info[:2]), "executable": sys.executable, "path": sys.path, "argv": sys.argv,
        "cwd": os.getcwd(), "ids": [os.getuid(), os.getgid(), sorted(os.getgroups())], "environ": dict(os.environ),
        "fds": fds, "release": read("/etc/os-release"), "hello": read("/opt/data/hello.txt"),
        "users": read("/etc/passwd"), "mounts": read("/proc/self/mountinfo"), "status": read("/proc/self/status"),
        "pid": os.getpid(), "bind": read("/data/bound/file"), "ours": [m for m in sys.modules if "bootseer" in m],
        "signals": [line for line in read("/proc/self/status").splitlines() if line.startswith("Sig")],
    }, file)
"""
# Both ranks write to the image, and to what is the node's.
SHARES = """
import os, sys, time
rank = os.environ["RANK"]
def wait(path):
    for _ in range(1500):
        if os.path.exists(path):
            return open(path).read()
        time.sleep(0.01)
    sys.exit("nothing came: " + path)
for folder in ("/opt/data", "/dev/shm", "/tmp", "."):
    path = folder + "/shared-KEY-"
    with open(path + rank + ".new", "w") as file:
        file.write(rank)
    os.rename(path + rank + ".new", path + rank)
    other = str(1 - int(rank))
    assert wait(path + other) == other
with open("/opt/data/hello.txt", "a") as file:
    file.write(rank)
os.mkdir("/usr/made-" + rank)
"""
# Processes of a rank, as data loaders have them: one by fork, one by spawn, both with shared memory.
WORKERS = """
import multiprocessing, os
from multiprocessing import shared_memory
def work(name, queue):
    memory = shared_memory.SharedMemory(name)
    memory.buf[0] += 1
    memory.close()
    queue.put((os.getpid(), os.path.exists("/opt/data/hello.txt")))
if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=100)
    try:
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            workers = [context.Process(target=work, args=(memory.name, queue)) for _ in range(2)]
            for worker in workers:
                worker.start()
                worker.join()
            found = [queue.get() for _ in workers]
            assert all(inside for _, inside in found) and len({pid for pid, _ in found}) == 2
        assert memory.buf[0] == 4
    finally:
        memory.close()
        memory.unlink()
    open("workers-" + os.environ["RANK"], "w").close()
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A root file system; whatever a test does, its files stay as they are."""
    directory = tempfile.mkdtemp(prefix="image-root-")
    os.chmod(directory, 0o755)
    make_root(directory)
    before = snapshot(directory)
    yield directory
    after = snapshot(directory)
    shutil.rmtree(directory)
    assert after == before


def snapshot(directory: str) -> dict[str, tuple[int, int, int]]:
    """Size, time and mode of everything."""
    found = {}
    for base, directories, files in os.walk(directory):
        for name in (*directories, *files):
            path = os.path.join(base, name)
            status = os.lstat(path)
            found[path] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return found


@pytest.fixture(autouse=True)
def _no_mounts_stay(root: str, tmp_path: Path) -> Iterator[None]:
    """The node never sees any of a job's."""

    def mounts() -> list[str]:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            return [line for line in file.read().splitlines() if root in line or str(tmp_path) in line]

    yield
    support.wait_until(lambda: not mounts(), what="mounts that stay")


@pytest.fixture
def image(bootrun: support.Programs, root: str) -> Callable[..., support.Run]:
    """Runs a job of two ranks in the image to its end."""

    def run(
        *words: str | os.PathLike[str], env: Mapping[str, str | None] | None = None, status: int = 0
    ) -> support.Run:
        done = bootrun("--standalone", "--nproc-per-node", "2", "--image", f"rootfs:{root}", *words, env=env)
        assert done.status == status, done.stderr
        return done

    return run


def told(run: support.Run | support.Programs, rank: int = 0, restart: int = 0) -> dict[str, Any]:
    with open(os.path.join(run.dir, f"tell-{rank}-{restart}"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
        return found


def write(directory: str | os.PathLike[str], name: str, text: str) -> str:
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


# ---- what a rank sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fork", ["off", "on"])
def test_what_a_rank_sees(
    image: Callable[..., support.Run], bootrun: support.Programs, tmp_path: Path, fork: str
) -> None:
    (tmp_path / "bound").mkdir()
    (tmp_path / "bound" / "file").write_text("of the node")
    write(bootrun.dir, "tell.py", TELL)
    run = image(
        *("--fork-ranks", fork, "--preload", "none,json", "--redirects", "3", "--log-dir", tmp_path / "logs"),
        *("--image-bind", f"{tmp_path}/bound:/data/bound:ro"),
        *("--image-env", "MINE=1", "--image-env", "RIVAL=image"),
        *("tell.py", "--lr", "1"),
        env={"RIVAL": "caller", "KEPT": "yes", "LD_LIBRARY_PATH": "/nowhere", "PYTHONPATH": "/nowhere/either",
             "VIRTUAL_ENV": "/x", "CONDA_PREFIX": "/y", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    events = "".join(path.read_text() for path in (tmp_path / "logs").glob("*/events/agent-*"))
    assert events.count('"how":"fork"' if fork == "on" else '"how":"exec"') == 2
    for rank in range(2):
        seen = told(run, rank)
        assert tuple(seen["version"]) == find_interpreter().version
        assert seen["executable"] == "/usr/local/bin/python3" and seen["release"] == "ID=made\n"
        assert all(each.startswith(("/usr/local/lib/python", bootrun.dir)) for each in seen["path"]), seen["path"]
        assert (seen["argv"], seen["cwd"]) == (["tell.py", "--lr", "1"], bootrun.dir)
        assert seen["ids"] == [os.getuid(), os.getgid(), sorted(os.getgroups())]
        assert seen["bind"] == "of the node" and seen["hello"] == "from the image\n"
        assert "imageuser" in seen["users"] and "nobody" in seen["users"]
        assert seen["ours"] == ["_bootseer_rank"]
        fds = {fd for fd, path in seen["fds"].items() if "bootseer-page" not in path}
        assert fds - {"3"} == {"0", "1", "2"}, seen["fds"]  # 3: the folder that is listed
        assert re.search("^NoNewPrivs:\t1$", seen["status"], re.MULTILINE)
        ignored = {int(line.split()[1], 16) for line in seen["signals"] if line.startswith("SigIgn")}
        # What Python itself ignores, and the C library's own two, which no program can give back.
        allowed = support.signal_mask(signal.SIGPIPE, signal.SIGXFSZ, 32, 33)
        assert {mask & ~allowed for mask in ignored} == {0}
        allowed = ("/etc/", "/run/bootseer/", "/dev", "/proc", "/sys", "/tmp", "/data/bound", os.environ["HOME"])
        places = [line.split()[4] for line in seen["mounts"].splitlines()]
        assert all(place == "/" or place.startswith(allowed) for place in places), places
        environ = seen["environ"]
        assert environ["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        assert (environ["RANK"], environ["WORLD_SIZE"]) == (str(rank), "2")
        assert (environ["MINE"], environ["RIVAL"], environ["KEPT"]) == ("1", "image", "yes")
        assert not {"LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"} & set(environ)
        assert environ["PYTHONNOUSERSITE"] == "1"


def test_ranks_share_the_image_and_the_node(
    image: Callable[..., support.Run], bootrun: support.Programs, root: str
) -> None:
    """What they write to the image's folders the other one sees, and nobody else ever does."""
    key = os.path.basename(bootrun.dir) + str(os.getpid())
    write(bootrun.dir, "shares.py", SHARES.replace("KEY", key))
    image("shares.py")
    assert os.path.exists(f"{bootrun.dir}/shared-{key}-0")
    for rank in "01":
        for directory in ("/dev/shm", "/tmp"):
            os.unlink(f"{directory}/shared-{key}-{rank}")
        assert not os.path.exists(f"{root}/opt/data/shared-{key}-{rank}")
        assert not os.path.exists(f"{root}/usr/made-{rank}")


def test_workers_of_ranks(image: Callable[..., support.Run], bootrun: support.Programs) -> None:
    write(bootrun.dir, "workers.py", WORKERS)
    image("workers.py")
    assert all(os.path.exists(f"{bootrun.dir}/workers-{rank}") for rank in range(2))


def test_nothing_can_be_written(image: Callable[..., support.Run], bootrun: support.Programs) -> None:
    write(
        bootrun.dir, "writes.py",
        "import errno\n"
        "for path in ('/opt/data/new', '/etc/new', '/new', '/run/bootseer/new'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: assert error.errno == errno.EROFS, error\n"
        "    else: raise AssertionError(path)\n"
        "open('written', 'w').close()\n",
    )  # fmt: skip
    image("--image-writable", "none", "writes.py")
    assert os.path.exists(f"{bootrun.dir}/written")


def test_what_is_written_can_be_kept(
    image: Callable[..., support.Run], bootrun: support.Programs, root: str, tmp_path: Path
) -> None:
    write(bootrun.dir, "count.py",
          "import os\nif os.environ['RANK'] == '0':\n"
          "    open('/opt/data/count', 'a').write('x'); print(open('/opt/data/count').read())\n")  # fmt: skip
    for count in (1, 2):
        run = image("--image-writable", tmp_path / "kept", "count.py")
        assert run.stdout == "x" * count + "\n"
    assert (tmp_path / "kept" / "upper" / "opt" / "data" / "count").read_text() == "xx"
    # Two overlays with one upper folder would damage it.
    write(bootrun.dir, "stay.py", "import signal; print('here', flush=True); signal.pause()")
    first = bootrun.start(
        *("--standalone", "--image", f"rootfs:{root}", "--image-writable", tmp_path / "kept", "stay.py")
    )
    support.wait_until(lambda: "here" in first.stdout)
    run = image("--image-writable", tmp_path / "kept", "count.py", status=1)
    assert f"--image-writable {tmp_path}/kept: another job on this node uses it" in run.stderr
    first.signal(signal.SIGTERM)
    assert first.wait().status == 143


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("--no-python", "cat", "/etc/os-release"), "ID=made\nID=made\n"),
        (("-m", "this_module"), "module\nmodule\n"),
        (("--run-path", "TOP/this_module.py"), "module\nmodule\n"),
        (("--rank-hooks", "off", "this_module.py"), "module\nmodule\n"),
        (("--image-python", "/usr/local/bin/python3", "this_module.py"), "module\nmodule\n"),
        (("--virtual-local-rank", "this_module.py", "device"), "device 4\ndevice 5\n"),
        (("/opt/data/bootstrap.py",), None),
    ],
)
def test_what_ranks_can_be(
    image: Callable[..., support.Run], bootrun: support.Programs, words: tuple[str, ...], output: str | None
) -> None:
    write(bootrun.dir, "this_module.py",
          "import os, sys\nwhat = 'device ' + os.environ['CUDA_VISIBLE_DEVICES'] if sys.argv[1:] else 'module'\n"
          "os.write(1, (what + '\\n').encode())\n")  # fmt: skip
    words = tuple(word.replace("TOP", bootrun.dir) for word in words)
    run = image(*words, env={"CUDA_VISIBLE_DEVICES": "4,5"}, status=0 if output else 1)
    if output is None:
        assert "can't open file '/opt/data/bootstrap.py'" in run.stderr  # an image may have its own scripts
    else:
        assert sorted(run.stdout.splitlines()) == sorted(output.splitlines())


def test_the_nodes_driver_is_seen_by_its_specification(
    program: support.Programs, root: str, tmp_path: Path
) -> None:
    """CDI, with a library of this node in the part of the driver's. In a namespace of its own, for /run/cdi."""
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found = re.findall(r"^\s+(lib\w+\.so\.\d+) \(libc6,x86-64\) => (/\S+)$", listing, re.MULTILINE)
    have = {name for _, _, files in os.walk(root) for name in files}
    alone = ("libcrypt.so.1", "libexpat.so.1", "libresolv.so.2")  # they need nothing but the C library
    usable = [(soname, os.path.realpath(path)) for soname, path in found if soname in alone and soname not in have]
    if not usable:
        pytest.skip("no library that the image lacks")
    soname, library = usable[0]
    spec = {
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "all", "containerEdits": {}}],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": [{"hostPath": library, "containerPath": f"/usr/lib/driver/{os.path.basename(library)}"}],
            "hooks": [
                {"path": "/x", "args": ["x", "create-symlinks", "--link", f"{soname}::/usr/lib/driver/plain.so"]},
                {"path": "/x", "args": ["x", "update-ldcache", "--folder", "/usr/lib/driver"]},
            ],
        },
    }  # fmt: skip
    write(tmp_path, "nvidia.json", json.dumps(spec))
    write(program.dir, "loads.py",
          "import ctypes, os\n"
          "print(os.environ['NVIDIA_VISIBLE_DEVICES'], os.readlink('/usr/lib/driver/plain.so'))\n"
          f"ctypes.CDLL({soname!r})\n")  # fmt: skip
    run = program(
        *("unshare", "--mount", "sh", "-ec"),
        f'mount -t tmpfs none /run; mkdir /run/cdi; cp {tmp_path}/nvidia.json /run/cdi; exec "$@"',
        *("sh", support.BOOTRUN, "--standalone", "--image", f"rootfs:{root}", "loads.py"),
    )
    assert run.status == 0, run.stderr
    assert run.stdout == f"void {soname}\n"
    assert "CDI: the hook update-ldcache is not run" in run.stderr


# ---- failures ------------------------------------------------------------------------------------------------


def test_what_a_rank_says_of_its_failure(
    image: Callable[..., support.Run], bootrun: support.Programs, tmp_path: Path
) -> None:
    write(bootrun.dir, "fails.py", "import os\nif os.environ['RANK'] == '1': raise ValueError('of the image')\n")
    run = image("--redirects", "3", "--log-dir", tmp_path / "logs", "fails.py", status=1)
    (record,) = (tmp_path / "logs").glob("*/attempt_0/1/error.json")
    assert "ValueError: of the image" in record.read_text()
    assert "ValueError: of the image" in run.stderr


def test_restarts_find_what_was_written(image: Callable[..., support.Run], bootrun: support.Programs) -> None:
    write(bootrun.dir, "restarts.py",
          TELL + "\nopen('/opt/data/attempts', 'a').write(os.environ['RANK'])\n"
          "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '0': sys.exit(3)\n"
          "assert len(open('/opt/data/attempts').read()) >= 2\n")  # fmt: skip
    image("--max-restarts", "1", "--restart-backoff", "0", "--shutdown-timeout", "2", "restarts.py")
    assert told(bootrun, 0, 1)["release"] == "ID=made\n"


@pytest.mark.parametrize("fork", ["off", "on"])
def test_a_service_that_dies_is_replaced(bootrun: support.Programs, root: str, fork: str) -> None:
    """Ranks that run go on; those of the next attempt get into the image as well."""
    write(bootrun.dir, "survives.py",
          TELL + "\nimport time\nopen('up', 'w').close()\n"
          "while os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
          "    if os.path.exists('go'): sys.exit(3)\n    time.sleep(0.01)\n")  # fmt: skip
    program = bootrun.start(
        *(
            "--standalone",
            "--max-restarts",
            "1",
            "--restart-backoff",
            "0",
            "--fork-ranks",
            fork,
            "--preload",
            "none,json",
        ),
        *("--image", f"rootfs:{root}", "survives.py"),
    )
    support.wait_until(lambda: os.path.exists(f"{bootrun.dir}/up"))
    kill_service(program)
    support.wait_until(lambda: "reopening the image" in program.stderr)
    write(bootrun.dir, "go", "")
    run = program.wait()
    assert run.status == 0, run.stderr
    assert told(bootrun, 0, 1)["release"] == "ID=made\n"


def test_a_directory_for_what_is_written_outlives_its_service(
    bootrun: support.Programs, root: str, tmp_path: Path
) -> None:
    """It is below one root at a time: ranks that run go on, no other job gets it, the next attempt finds it."""
    write(bootrun.dir, "keeps.py",
          "import os, sys, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
          "if not first:\n    sys.exit(len(open('/opt/data/kept').read()) != 2)\n"
          "open('/opt/data/kept', 'w').write('1')\nopen('up', 'w').close()\n"
          "while not os.path.exists('go'): time.sleep(0.01)\n"
          "open('/opt/data/kept', 'a').write('2')\nsys.exit(3)\n")  # fmt: skip
    words = ("--standalone", "--image", f"rootfs:{root}", "--image-writable", tmp_path / "kept")
    program = bootrun.start(*words, "--max-restarts", "1", "--restart-backoff", "0", "keeps.py")
    support.wait_until(lambda: os.path.exists(f"{bootrun.dir}/up"))
    kill_service(program)
    support.wait_until(lambda: "reopening the image before the next start of ranks" in program.stderr)

    def is_taken() -> bool:
        other = bootrun(*words, "--no-python", "true")
        return other.status == 1 and "another job on this node uses it" in other.stderr

    support.wait_until(is_taken, 20)
    write(bootrun.dir, "go", "")
    run = program.wait()
    assert run.status == 0, run.stderr


def kill_service(program: support.Program) -> None:
    def find() -> list[int]:
        below = support.descendants(program.pid)
        return [
            each.pid
            for each in below
            if "bootseer.mounts.sandbox.service" in each.command and each.ppid == program.pid
        ]

    os.kill(support.wait_until(find)[0], signal.SIGKILL)


@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_go_on_when_no_service_lives(bootrun: support.Programs, root: str, restarts: int) -> None:
    """There are no others then."""
    write(bootrun.dir, "goes_on.py",
          "import os, sys, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
          "import decimal\nprint('done', flush=True)\nsys.exit(int(sys.argv[1]))\n")  # fmt: skip
    program = bootrun.start(
        *("--standalone", "--max-restarts", restarts, "--restart-backoff", "0", "--fork-ranks", "off"),
        *("--image", f"rootfs:{root}", "goes_on.py", 3 if restarts else 0),
    )
    support.wait_until(lambda: os.path.exists(f"{bootrun.dir}/up"))
    for count in (1, 2):
        kill_service(program)
        support.wait_until(lambda count=count: program.stderr.count("reopening the image") == count)  # type: ignore[misc]
    kill_service(program)
    support.wait_until(
        lambda: (
            not [
                each
                for each in support.descendants(program.pid)
                if "bootseer.mounts.sandbox.service" in each.command
            ]
        )
    )
    write(bootrun.dir, "go", "")
    run = program.wait()
    assert run.stdout == "done\n"
    assert run.status == (1 if restarts else 0), run.stderr
    assert ("bootrun: error: --image: opened 3 times, and lost repeatedly" in run.stderr) == bool(restarts)


def test_a_killed_bootrun_leaves_nothing(bootrun: support.Programs, root: str) -> None:
    """The leak check looks for processes, `_no_mounts_stay` for mounts."""
    write(bootrun.dir, "stay.py", "import signal; print('here', flush=True); signal.pause()")
    program = bootrun.start("--standalone", "--nproc-per-node", "2", "--image", f"rootfs:{root}", "stay.py")
    support.wait_until(lambda: program.stdout.count("here") == 2)
    everybody = support.descendants(program.pid)
    namespaces = {os.readlink(f"/proc/{each.pid}/ns/mnt") for each in everybody}
    assert len(namespaces) == 2  # the node's and the job's
    program.signal(signal.SIGKILL)
    program.wait()
    support.wait_until(lambda: not any(support.is_running(each.pid) for each in everybody))
    assert len(all_namespaces() & namespaces) == 1


def all_namespaces() -> set[str]:
    found = set()
    for process in support.processes():
        try:
            found.add(os.readlink(f"/proc/{process.pid}/ns/mnt"))
        except OSError:
            pass
    return found


def test_signals_reach_ranks(bootrun: support.Programs, root: str) -> None:
    write(bootrun.dir, "handles.py",
          "import signal, sys\n"
          "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(0)))\n"
          "print('here', flush=True)\nwhile True: signal.pause()\n")  # fmt: skip
    program = bootrun.start("--standalone", "--image", f"rootfs:{root}", "handles.py")
    support.wait_until(lambda: "here\n" in program.stdout)
    program.signal(signal.SIGTERM)
    run = program.wait()
    assert (run.status, run.stdout) == (143, "here\ntold\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--image", "rootfs:/no/such/folder"), "/no/such/folder: is not a directory of this node"),
        (("--image", "/no/such/tree"), "there is no tree here"),
        (("--image", "ROOT", "--image-python", "python9"), "has no python9 on its PATH"),
        (("--image", "ROOT", "--image-bind", "TOP:/usr/local"), "/usr/local is the node's"),
        (("--image", "ROOT", "--image-bind", "/no/such/file:/x"), "/no/such/file cannot be bound into the image"),
        (("--image", "ROOT", "--image-bind", "TOP:TOP/not/there"), "does not exist in a directory of the node"),
        (
            ("--image", "ROOT", "--image-bind", "/etc/hostname:/opt/data"),
            "is a file on the node and a directory in the image",
        ),
        (("--image", "ROOT", "--image-writable", "/proc/x"), "--image-writable /proc/x"),
    ],
)
def test_what_cannot_be_is_one_line(
    bootrun: support.Programs, root: str, words: tuple[str, ...], line: str
) -> None:
    write(bootrun.dir, "tell.py", TELL)
    words = tuple(word.replace("ROOT", f"rootfs:{root}").replace("TOP", bootrun.dir) for word in words)
    run = bootrun("--standalone", *words, "tell.py")
    assert run.status == 1
    (said,) = [each for each in run.stderr.splitlines() if each.startswith("bootrun: error: ")]
    assert line in said, run.stderr
    assert not os.path.exists(f"{bootrun.dir}/tell-0-0")


def test_a_directory_that_would_hide_the_image_is_left_out(bootrun: support.Programs, root: str) -> None:
    path = write(bootrun.dir, "tell.py", TELL)
    run = bootrun("--standalone", "--image", f"rootfs:{root}", path, cwd="/usr/lib")
    assert run.status == 1
    assert "/usr/lib of this node is not visible inside the image" in run.stderr
    assert "the working directory /usr/lib cannot be entered inside the image" in run.stderr


# ---- several nodes, checkpoints ------------------------------------------------------------------------------


def test_nodes_with_different_images_are_refused(bootrun: support.Programs, root: str, free_port: int) -> None:
    write(bootrun.dir, "tell.py", TELL)
    link = f"{bootrun.dir}/other"
    shutil.copytree(root, link, symlinks=True)
    words = [*NODES, f"localhost:{free_port}"]
    programs = [bootrun.start(*words, "--image", f"rootfs:{each}", "tell.py") for each in (root, link)]
    runs = [program.wait() for program in programs]
    assert [run.status for run in runs] == [1, 1]
    assert any("(image)" in run.stderr and "different Python environments" in run.stderr for run in runs)


def test_nodes_of_one_image(bootrun: support.Programs, root: str, free_port: int) -> None:
    write(bootrun.dir, "tell.py", TELL)
    words = [*NODES, f"localhost:{free_port}"]
    programs = [bootrun.start(*words, "--image", f"rootfs:{root}", "tell.py") for _ in range(2)]
    for program in programs:
        run = program.wait()
        assert run.status == 0, run.stderr
    assert {told(bootrun, rank)["environ"]["WORLD_SIZE"] for rank in range(2)} == {"2"}


def test_a_node_whose_image_fails_leaves_the_job(bootrun: support.Programs, root: str, free_port: int) -> None:
    write(bootrun.dir, "tell.py", TELL)
    words = [*NODES, f"localhost:{free_port}", "--rdzv-conf", "join_timeout=3"]
    good = bootrun.start(*words, "--image", f"rootfs:{root}", "tell.py")
    bad = bootrun.start(*words, "--image", "rootfs:/no/such/folder", "tell.py").wait()
    assert bad.status == 1 and "/no/such/folder: is not a directory" in bad.stderr
    assert good.wait().status == 1


READS = """
import hashlib, os
path = os.environ["BOOTSEER_CHECKPOINT"]
for name in NAMES:
    with open(os.path.join(path, name) if name else path, "rb") as file:
        os.write(1, (path + " " + hashlib.sha256(file.read()).hexdigest() + chr(10)).encode())
"""


def test_links_into_the_arena_can_be_read_inside(
    image: Callable[..., support.Run], bootrun: support.Programs
) -> None:
    data = os.urandom(300_000)
    write(bootrun.dir, "reads.py", READS.replace("NAMES", "['']"))
    with FaultyHttpServer({"model.bin": data}) as server:
        run = image("--load-checkpoint", server.url_of("model.bin"), "reads.py")
    lines = run.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [hashlib.sha256(data).hexdigest()] * 2
    assert all(line.startswith("/") for line in lines), "by their path, not by a URL"


def test_a_mount_that_came_later_can_be_read_inside(
    bootrun: support.Programs, root: str, free_port: int, tmp_path: Path
) -> None:
    """Of a striped version of several nodes: a FUSE mount, made when the image is open already."""
    need_fuse()
    data = [os.urandom(100_000) for _ in range(2)]
    files = [(f"node-{number}.bin", MemoryInput([each])) for number, each in enumerate(data)]
    aio.run_sync(write_version(LocalStore(str(tmp_path)), "ckpt", files))
    aio.close()
    write(bootrun.dir, "reads.py", READS.replace("NAMES", "['node-%s.bin' % os.environ['GROUP_RANK']]"))
    words = [
        *NODES,
        f"localhost:{free_port}",
        "--load-checkpoint",
        f"{tmp_path}/ckpt",
        "--image",
        f"rootfs:{root}",
    ]
    programs = [bootrun.start(*words, "reads.py") for _ in range(2)]
    runs = [program.wait() for program in programs]
    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    lines = [run.stdout.split() for run in runs]
    assert sorted(found for _, found in lines) == sorted(hashlib.sha256(each).hexdigest() for each in data)
    assert all(path.endswith("/mount") for path, _ in lines)


# ---- trees ---------------------------------------------------------------------------------------------------


class Configured:
    """A folder as an image with variables of its own. Implements Source."""

    def __init__(self, folder: str, env: list[str]) -> None:
        self.name = "made"
        self._directory, self._env = DirectorySource(folder), env

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        found = self._directory.read(packer, hot_paths, on_progress)
        return found._replace(config=Config(env=self._env))


class Published(NamedTuple):
    """The image as a tree at a server."""

    server: FaultyHttpServer
    digest: str

    @property
    def url(self) -> str:
        return f"{self.server.url}@sha256:{self.digest}"


@pytest.fixture(scope="module")
def built(root: str) -> tuple[dict[str, bytes], str]:
    """The files of a tree's folder, and its digest."""
    files: dict[str, bytes] = {}
    env = ["PATH=/opt/none:/usr/local/bin:/bin", "OF_IMAGE=yes", "KEPT=image", "OMP_NUM_THREADS=3", "RANK=77"]
    done = build(Configured(root, env), lambda digest, data: files.__setitem__(f"packs/{digest}", data), threads=1)
    files[f"index/{done.digest}"] = done.index_bytes
    return files, done.digest


@pytest.fixture
def tree(
    built: tuple[dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Published]:
    """Mounted by a daemon of this test's own, which is ended."""
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{tmp_path}/run")
    with FaultyHttpServer(built[0]) as server:
        yield Published(server, built[1])
        unmount_tree(built[1], force=True)


STEPS = TELL + "\nsys.modules['_bootseer_rank'].heartbeat(1, {})\nimport time\ntime.sleep(0.3)\n"


def test_the_first_start_is_recorded_and_the_next_prefetched(
    bootrun: support.Programs, tree: Published, tmp_path: Path
) -> None:
    write(bootrun.dir, "steps.py", STEPS)

    def start(cache: str, log: str, *, stays: bool = False) -> tuple[str, dict[str, float]]:
        """bootrun's lines, and the figures of its events. Args: stays: the mount, for the next start."""
        run = bootrun(
            *(
                "--standalone",
                "--nproc-per-node",
                "2",
                "--image",
                tree.url,
                "--log-dir",
                tmp_path / log,
                "steps.py",
            ),
            env={"BOOTSEER_CACHE": f"{tmp_path}/{cache}", "BOOTSEER_RUNTIME": f"{tmp_path}/run", "KEPT": "caller"},
        )
        assert run.status == 0, run.stderr
        assert stays or unmount_tree(tree.digest)
        (events,) = (tmp_path / log).glob("*/events/agent-*")
        found = [event for event in read_events(str(events)) if event.stage == "image"]
        assert [event.attrs["how"] for event in found if event.kind == "end"] == ["mounted"]
        figures = {event.name: float(event.value or 0) for event in found if event.kind == "scalar"}
        return run.stderr, figures

    said, first = start("one", "log1")
    assert "recorded for the next start" in said
    assert (
        first["image_had_trace"] == 0 and first["image_demand_blocks"] > 0 and first["image_prefetch_blocks"] == 0
    )
    environ = told(bootrun)["environ"]
    assert (environ["OF_IMAGE"], environ["KEPT"], environ["OMP_NUM_THREADS"]) == ("yes", "caller", "3")
    assert (environ["RANK"], environ["PATH"]) == ("0", "/opt/none:/usr/local/bin:/bin")

    # From the cache of this node: nothing is asked for, but for a block that the kernel by chance reads ahead now.
    _, again = start("one", "log2")
    assert again["image_requests"] <= 1 and first["image_requests"] > 10, (first, again)

    # By a mount that is still there: what the start before has read is not this one's.
    _, before = start("three", "log4", stays=True)
    _, after = start("three", "log5")
    assert before["image_requests"] > 10 and after["image_requests"] <= 1, (before, after)
    assert after["image_read_bytes"] < before["image_read_bytes"] / 10
    assert after["image_blocked_s"] < before["image_blocked_s"]

    # Another node that knows only the recording.
    (trace,) = (tmp_path / "one" / "trees" / tree.digest).glob("trace-*")
    place = tmp_path / "two" / "trees" / tree.digest
    place.mkdir(parents=True, mode=0o700)
    for directory in (tmp_path / "two", tmp_path / "two" / "trees"):
        directory.chmod(0o700)
    shutil.copy(trace, place)
    said, second = start("two", "log3")
    assert second["image_had_trace"] == 1
    assert second["image_prefetch_blocks"] > 10 * second["image_demand_blocks"], (first, second)
    assert second["image_blocked_s"] < first["image_blocked_s"]
    assert "% prefetched" in said


def test_an_image_that_is_lost_fails_ranks_and_is_opened_again(
    bootrun: support.Programs, tree: Published, tmp_path: Path
) -> None:
    """What its daemon served cannot be read any more: no wrong bytes, no hang. The next attempt has it again."""
    write(bootrun.dir, "late.py",
          "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
          "import decimal, sqlite3, xml.dom.minidom, asyncio, email.mime.text, http.client\n")  # fmt: skip
    program = bootrun.start(
        *("--standalone", "--image", tree.url, "--max-restarts", "1", "--restart-backoff", "0"),
        *("--fork-ranks", "off", "late.py"),
        env={"BOOTSEER_CACHE": f"{tmp_path}/cache", "BOOTSEER_RUNTIME": f"{tmp_path}/run"},
    )
    support.wait_until(lambda: os.path.exists(f"{bootrun.dir}/up"))
    (state,) = (tmp_path / "run/trees").glob("*/state")
    os.kill(json.loads(state.read_text())["daemon"], signal.SIGKILL)
    write(bootrun.dir, "go", "")
    run = program.wait(60.0)
    assert run.status == 0, run.stderr
    assert "reopening the image: it cannot be read any more" in run.stderr
    assert "restart 1 of 1" in run.stderr


# Imports, when the test says so, what it has not read yet.
LATE = """
import os, time
open("up", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
import decimal, sqlite3, xml.dom.minidom, asyncio, email.mime.text, http.client
"""
WRONG = HttpFault(HttpKind.WRONG, "packs/*", keep_bytes=7)


def start_late(
    bootrun: support.Programs, tree: Published, tmp_path: Path, fault: HttpFault, *flags: str
) -> support.Program:
    """A job in the image, whose store fails once its rank runs."""
    write(bootrun.dir, "late.py", LATE)
    program = bootrun.start(
        *("--standalone", "--image", tree.url, "--max-restarts", "3", "--restart-backoff", "0", *flags, "late.py"),
        env={
            "BOOTSEER_CACHE": f"{tmp_path}/cache",
            "BOOTSEER_RUNTIME": f"{tmp_path}/run",
            "BOOTSEER_MOUNT_DEADLINE": "1",
        },
    )
    support.wait_until(lambda: os.path.exists(f"{bootrun.dir}/up"))
    tree.server.plan[:] = [fault]
    write(bootrun.dir, "go", "")
    return program


def test_a_damaged_image_is_named_and_the_job_given_up(
    bootrun: support.Programs, tree: Published, tmp_path: Path
) -> None:
    """It is nobody's code, no disk's fault, and comes again in each attempt."""
    program = start_late(bootrun, tree, tmp_path, WRONG, "--log-dir", f"{tmp_path}/logs")
    run = program.wait(60.0)
    assert run.status == 1
    said = rf"warning: reads of the image fail: {tree.server.url}/packs/\w+: block \d+, .* not match its digest"
    assert re.search(said, run.stderr), run.stderr
    assert "restart 1 of 3" in run.stderr and "restart 2 of 3" not in run.stderr
    assert "class     : mount (the image could not be read)" in run.stderr
    assert "the same as in the last attempt, so another would fail there too" in run.stderr
    tree.server.plan[:] = []
    run = bootrun(
        *("--standalone", "--image", tree.url, "late.py"),
        env={"BOOTSEER_CACHE": f"{tmp_path}/cache", "BOOTSEER_RUNTIME": f"{tmp_path}/run"},
    )
    assert run.status == 0, run.stderr  # the store has been mended


def test_an_image_whose_store_fails_is_unpacked_by_the_next_attempt(
    bootrun: support.Programs, tree: Published, tmp_path: Path
) -> None:
    fault = HttpFault(HttpKind.STATUS, "packs/*", status=500)
    program = start_late(bootrun, tree, tmp_path, fault)
    support.wait_until(lambda: "restart 1 of 3" in program.stderr, 30)
    tree.server.plan[:] = []
    run = program.wait(60.0)
    assert run.status == 0, run.stderr
    assert "class mount (the image could not be read)" in run.stderr
    assert "the image is unpacked, as reads of its mount have failed: " in run.stderr


def test_an_interpreter_that_cannot_be_read_is_the_images_matter(
    bootrun: support.Programs, tree: Published, tmp_path: Path
) -> None:
    """Ranks cannot even start."""
    write(bootrun.dir, "late.py", LATE)
    tree.server.plan[:] = [WRONG]
    run = bootrun(
        *("--standalone", "--image", tree.url, "--max-restarts", "3", "--restart-backoff", "0", "late.py"),
        env={
            "BOOTSEER_CACHE": f"{tmp_path}/cache",
            "BOOTSEER_RUNTIME": f"{tmp_path}/run",
            "BOOTSEER_MOUNT_DEADLINE": "0.5",
        },
        deadline_s=60,
    )
    assert run.status == 1
    assert "cannot start /usr/local/bin/python3 inside the image: input/output error" in run.stderr
    assert "class     : mount, likely (the image could not be read)" in run.stderr
    assert "class user" not in run.stderr and "restart 3" not in run.stderr


# ---- another user --------------------------------------------------------------------------------------------


USER = 65534
BECOME = (
    f"import os, sys; os.setgroups([{USER}, 33]); os.setgid({USER}); os.setuid({USER}); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def user_python() -> tuple[str, dict[str, str]]:
    """An interpreter that other users can run, and variables by which it finds us; skips if there is none."""
    top = str(Path(__file__).parents[2])
    packages = [top, *(path for path in sys.path if path.endswith("-packages"))]
    environ = {"PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    for program in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        check = [
            sys.executable,
            "-c",
            BECOME,
            program,
            "-c",
            "import launcher.app, bootseer.mounts.sandbox.process, msgspec",
        ]
        if subprocess.run(check, env={**os.environ, **environ}, capture_output=True).returncode == 0:
            return program, environ
    pytest.skip("no interpreter with Bootseer's packages that another user can run")


@pytest.fixture
def users_programs() -> Iterator[support.Programs]:
    """In a folder of the other user's; not below tmp_path, which pytest closes to others again and again."""
    directory = tempfile.mkdtemp(prefix="image-user-")
    os.mkdir(f"{directory}/tmp")
    for each in (directory, f"{directory}/tmp"):
        os.chown(each, USER, USER)
    programs = support.Programs(directory)
    yield programs
    programs.close()
    shutil.rmtree(directory)


@pytest.fixture
def user_image(users_programs: support.Programs, root: str) -> Callable[..., support.Run]:
    """bootrun as an ordinary user."""
    python, environ = user_python()
    program = users_programs

    def run(*words: str | os.PathLike[str], status: int = 0, image: str = f"rootfs:{root}") -> support.Run:
        done = program(
            *(sys.executable, "-c", BECOME, python, "-m", "launcher", "--standalone", "--nproc-per-node", "2"),
            *("--image", image, *words),
            env={**environ, "HOME": program.dir, "BOOTSEER_RUNTIME": f"{program.dir}/run", "USER": "nobody"},
        )
        if "no namespaces for an image here" in done.stderr:
            pytest.skip("user namespaces are switched off here")
        assert done.status == status, done.stderr
        return done

    return run


@pytest.mark.parametrize("fork", ["off", "on"])
def test_an_ordinary_user_gets_in_too(
    user_image: Callable[..., support.Run], users_programs: support.Programs, fork: str, root: str
) -> None:
    write(users_programs.dir, "tell.py", TELL + "\nopen('/mine-' + os.environ['RANK'], 'w').close()\n")
    os.chmod(root, 0o777)  # as it is unpacked for this user: its root can be written to
    try:
        run = user_image("--fork-ranks", fork, "--preload", "none,json", "tell.py")
    finally:
        os.chmod(root, 0o755)
    for rank in range(2):
        seen = told(run, rank)
        assert seen["ids"][:2] == [USER, USER]
        assert seen["release"] == "ID=made\n" and tuple(seen["version"]) == find_interpreter().version
        assert re.search("^CapEff:\t0000000000000000$", seen["status"], re.MULTILINE)
        assert re.search("^NoNewPrivs:\t1$", seen["status"], re.MULTILINE)
        assert f":x:{USER}:" in seen["users"]


def test_an_ordinary_user_gets_a_tree_unpacked(
    user_image: Callable[..., support.Run], users_programs: support.Programs, tree: Published
) -> None:
    """Once; the next job finds it there."""
    write(users_programs.dir, "tell.py", TELL + "\nopen('/opt/data/new-' + os.environ['RANK'], 'w').close()\n")
    run = user_image("tell.py", image=tree.url)
    assert "the image is unpacked, as it cannot be mounted here" in run.stderr
    seen = told(run)
    assert seen["release"] == "ID=made\n" and seen["environ"]["OF_IMAGE"] == "yes"
    before = tree.server.count()
    user_image("tell.py", image=tree.url)
    assert tree.server.count() == before
    place = Path(users_programs.dir) / ".cache" / "bootseer" / "unpacked" / tree.digest
    assert (place / "tree" / "opt" / "data" / "hello.txt").stat().st_uid == USER
    assert not (place / "tree" / "opt" / "data" / "new-0").exists()


def test_a_checkpoint_of_an_ordinary_user(
    user_image: Callable[..., support.Run], users_programs: support.Programs
) -> None:
    """From a user namespace links into another process's memory lead nowhere: ranks get the file's own path."""
    data = os.urandom(300_000)
    (Path(users_programs.dir) / "model.bin").write_bytes(data)
    write(users_programs.dir, "reads.py", READS.replace("NAMES", "['']"))
    run = user_image("--load-checkpoint", "model.bin", "reads.py")
    expected = f"{users_programs.dir}/model.bin {hashlib.sha256(data).hexdigest()}"
    assert run.stdout.splitlines() == [expected] * 2
    assert "the checkpoint's files are not visible inside the image" in run.stderr


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_that_ends_while_its_image_is_unpacked(
    users_programs: support.Programs, tree: Published, signum: int
) -> None:
    """Nothing goes on after it (the leak check); what is there is used by the next one."""
    python, environ = user_python()
    write(users_programs.dir, "tell.py", TELL)
    words = (
        sys.executable,
        "-c",
        BECOME,
        python,
        "-m",
        "launcher",
        "--standalone",
        "--image",
        tree.url,
        "tell.py",
    )
    env = {**environ, "HOME": users_programs.dir, "BOOTSEER_RUNTIME": f"{users_programs.dir}/run"}
    tree.server.rate = 1e6
    program = users_programs.start(*words, env=env)
    place = Path(users_programs.dir) / ".cache" / "bootseer" / "unpacked" / tree.digest
    support.wait_until(
        lambda: any(path.is_file() for path in place.glob("tree/**/*.py")) or program.process.poll()
    )
    assert not (place / "complete").exists(), program.stderr
    program.signal(signum)
    run = program.wait()
    assert run.status == (-signum if signum == signal.SIGKILL else 128 + signum)
    tree.server.rate = None
    again = users_programs(*words, env=env)
    assert again.status == 0 or "user namespaces" in again.stderr, again.stderr


def test_another_user_cannot_enter(bootrun: support.Programs, root: str) -> None:
    """The address of a job's image is no secret: whoever asks there is asked who he is."""
    python, _ = user_python()
    write(bootrun.dir, "stay.py", "import signal; print('here', flush=True); signal.pause()")
    program = bootrun.start("--standalone", "--image", f"rootfs:{root}", "stay.py")
    support.wait_until(lambda: "here" in program.stdout)
    with open("/proc/net/unix", encoding="utf-8") as file:
        addresses = set(re.findall(r"@(bootseer-root-\w+)", file.read()))
    for address in addresses:
        argv = [
            sys.executable,
            "-c",
            BECOME,
            python,
            "-I",
            "-S",
            enter.__file__,
            address,
            "cat",
            "/etc/os-release",
        ]
        run = subprocess.run(argv, capture_output=True, text=True, cwd="/")
        assert (run.returncode, run.stdout) == (126, "")
        assert "the image's sandbox process does not answer" in run.stderr
    assert addresses
    program.signal(signal.SIGTERM)
    program.wait()


def test_texts_of_an_image_tell_what_may_be_fork_server(
    image: Callable[..., support.Run], bootrun: support.Programs, tmp_path: Path
) -> None:
    """What the script changes matters to modules that mention it; theirs are not this node's files."""
    text = """
import os, sys, time
sys.excepthook = lambda *said: None
import wave
sys.modules['_bootseer_rank'].heartbeat(1, {})
end_s = time.monotonic() + 30
while os.environ["LOCAL_RANK"] == "0" and time.monotonic() < end_s:
    if any(name.endswith(".plan") for folder in os.walk(sys.argv[1]) for name in folder[2]):
        break
    time.sleep(0.01)  # between looks, which end after 30 s
"""
    write(bootrun.dir, "train.py", text)
    write(bootrun.dir, "cgitb_like.py", "import sys\nbefore = sys.excepthook\n")
    words = ("--max-restarts", "1", "--fork-ranks", "on", "--preload", "none,json", "--log-dir", tmp_path / "logs")
    image(*words, "train.py", tmp_path / "logs", env={"BOOTSEER_CACHE_DIR": os.fspath(tmp_path / "cache")})
    (path,) = (tmp_path / "logs").glob("*/events/*.plan")
    assert "module wave" in path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("fork", ["off", "on"])
def test_steps_and_stacks_of_ranks_inside_are_seen(
    bootrun: support.Programs, root: str, tmp_path: Path, fork: str
) -> None:
    text = "import os, sys, time\nsys.modules['_bootseer_rank'].heartbeat(5, {})\n"
    text += "def inner():\n    open('ready-' + os.environ['RANK'], 'w').close()\n    time.sleep(1000)\ninner()\n"
    write(bootrun.dir, "steps.py", text)
    words = ("--standalone", "--nproc-per-node", "2", "--image", f"rootfs:{root}", "--fork-ranks", fork)
    job = bootrun.start(*words, "--preload", "none", "--log-dir", tmp_path / "logs", "steps.py")
    ranks = find_ranks(job, 2)
    assert not any(os.path.exists(rank.page_file) for rank in ranks)  # its name is gone
    own = [f"/proc/{job.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{job.pid}/fd")]
    pages = {path for path in own if os.path.lexists(path) and "bootseer-page" in os.readlink(path)}
    by_pid = {page.pid: path for path in pages if (page := SeenRank(0, 0, path).page()) is not None}
    ranks = [rank._replace(page_file=by_pid[rank.pid]) for rank in ranks]
    assert [page.step for page in (rank.page() for rank in ranks) if page is not None] == [5, 5]
    loop = Loop()
    found = collect(StackCollector(loop, ranks, py_spy=""), loop)
    loop.close()
    assert [found[rank].main[0].function for rank in (0, 1)] == ["inner", "inner"]
    job.signal(signal.SIGTERM)
    job.wait()
