"""The root of an image by itself: without an overlay, with hostile links in it, for other container tools."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from bootseer.errors import BootseerError, ConfigError, StorageError, StorageTimeout
from bootseer.mounts.sandbox.binds import Bind, plan_binds
from bootseer.mounts.sandbox.cdi_files import LIBRARIES
from bootseer.mounts.sandbox.environ import EnvironChanges
from bootseer.mounts.sandbox.image_root import ImageRequest, OpenImage, enter_path
from bootseer.mounts.sandbox.layers import Layer, LayersSpec
from bootseer.mounts.sandbox.process import ImageSandbox, SandboxRoot
from bootseer.mounts.sandbox.root import RootSpec
from bootseer.mounts.sandbox.run import run_in_image
from bootseer.mounts.sandbox.source import ImageSource
from bootseer.mounts.tree_daemon.mount import mount_tree, unmount_tree
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from tests import support
from tests.integration.image_roots import make_root
from tests.integration.mounted_trees import need_mounts
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of mounts: needs root"),
]
KERNEL = [Bind("/dev", "/dev"), Bind("/proc", "/proc"), Bind("/sys", "/sys")]


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="image-root-")
    os.chmod(directory, 0o755)
    make_root(directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def sandbox() -> Iterator[ImageSandbox]:
    made = ImageSandbox()
    yield made
    made.close()


def make(sandbox: ImageSandbox, root: str, *binds: Bind, **more: object) -> SandboxRoot:
    spec = RootSpec([root], binds=plan_binds([], [*KERNEL, *binds]))._replace(**more)
    return sandbox.make(spec, loader={}, programs=["python3"], path="/usr/local/bin")


def inside(held: SandboxRoot, *argv: str, cwd: str = "/", **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", enter_path(), held.address, *argv]
    environ = {"PATH": "/usr/local/bin:/usr/bin:/bin", **more}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environ)


def python(held: SandboxRoot, code: str) -> str:
    run = inside(held, "python3", "-c", code)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


# ---- how it is entered ---------------------------------------------------------------------------------------


def test_what_a_program_keeps(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    """Pid, descriptors, signals, limits, umask, nice value, environment; nothing of ours is added."""
    held = make(sandbox, root, Bind("/tmp", "/tmp"))
    (tmp_path / "data").write_text("inherited")
    code = (
        "import json, os, resource, signal, sys\n"
        "json.dump({'pid': os.getpid(), 'session': os.getsid(0), 'umask': os.umask(0), 'nice': os.nice(0),"
        " 'files': resource.getrlimit(resource.RLIMIT_NOFILE), 'environ': dict(os.environ), 'cwd': os.getcwd(),"
        " 'fds': sorted(int(n) for n in os.listdir('/proc/self/fd')), 'data': os.pread(7, 100, 0).decode(),"
        " 'ignored': [l for l in open('/proc/self/status') if l.startswith(('SigIgn', 'SigBlk'))],"
        " 'cmdline': open('/proc/self/cmdline').read().split(chr(0))[:3]}, sys.stdout)\n"
    )
    wrapper = (
        "import os, resource, signal, sys\n"
        "os.setsid(); os.umask(0o027); os.nice(3)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "for number in (signal.SIGPIPE, signal.SIGXFSZ): signal.signal(number, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        f"os.dup2(os.open({str(tmp_path / 'data')!r}, os.O_RDONLY), 7)\n"
        "print(os.getpid(), flush=True)\n"
        "os.execve(sys.argv[1], sys.argv[1:], {'ONE': '1', 'PATH': '/usr/local/bin'})\n"
    )
    argv = [
        sys.executable,
        "-c",
        wrapper,
        sys.executable,
        "-I",
        "-S",
        enter_path(),
        held.address,
        "python3",
        "-c",
        code,
    ]
    run = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    pid, _, text = run.stdout.partition("\n")
    seen = json.loads(text)
    assert seen["pid"] == seen["session"] == int(pid)
    assert (seen["umask"], seen["nice"], seen["files"], seen["data"]) == (
        0o027,
        min(19, 3 + os.nice(0)),
        [100, 200],
        "inherited",
    )
    assert seen["cwd"] == str(tmp_path)
    assert set(seen["fds"]) - {3} == {0, 1, 2, 7}  # 3: the folder that is listed
    # The image's Python may add a locale to its own copy.
    assert {name: value for name, value in seen["environ"].items() if name != "LC_CTYPE"} == {
        "ONE": "1",
        "PATH": "/usr/local/bin",
    }
    blocked, ignored = (int(line.split()[1], 16) for line in seen["ignored"])
    assert blocked == support.signal_mask(signal.SIGUSR1)
    # What the caller had ignored, and what the image's Python itself ignores.
    pythons = support.signal_mask(signal.SIGPIPE, signal.SIGXFSZ)
    assert ignored == support.ignored_signals() | support.signal_mask(signal.SIGINT) | pythons
    assert seen["cmdline"][:2] == ["python3", "-c"]


def test_programs_that_cannot_be_started(sandbox: ImageSandbox, root: str) -> None:
    held = make(sandbox, root)
    reasons = {
        "nothing": "no such file",
        "/no/such": "no such file",
        "/etc/passwd": "permission",
        "/opt": "permission",
    }
    for program, reason in reasons.items():
        run = inside(held, program)
        assert run.returncode == 127 and reason in run.stderr, run.stderr
        assert run.stderr.count("\n") == 1 and f"cannot start {program} inside the image" in run.stderr
    sandbox.close()
    run = inside(held, "cat", "/etc/passwd")
    assert run.returncode == 126 and "the image's sandbox process does not answer" in run.stderr


def test_the_loaders_variables_are_the_images(sandbox: ImageSandbox, root: str) -> None:
    spec = RootSpec([root], binds=plan_binds([], KERNEL))
    held = sandbox.make(spec, loader={"LD_LIBRARY_PATH": "/of/the/image"})
    run = inside(held, "env", LD_PRELOAD="", LD_LIBRARY_PATH="/of/the/node", OTHER="1")
    found = dict(line.split("=", 1) for line in run.stdout.splitlines())
    assert found["LD_LIBRARY_PATH"] == "/of/the/image" and "LD_PRELOAD" not in found and found["OTHER"] == "1"


def test_many_at_once(sandbox: ImageSandbox, root: str) -> None:
    held = make(sandbox, root)
    command = [sys.executable, "-I", "-S", enter_path(), held.address, "/bin/cat", "/etc/os-release"]
    programs = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/") for _ in range(16)]
    assert [program.communicate()[0] for program in programs] == [b"ID=made\n"] * 16


# ---- what it is made of --------------------------------------------------------------------------------------


def test_links_and_places_in_odd_images(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    """Links that lead up and away stay in the image; what is in the way is told, or made in the overlay."""
    odd = tmp_path / "odd"
    shutil.copytree(root, odd, symlinks=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    os.symlink("../../../../../.." + str(outside), odd / "up")
    os.symlink(str(outside), odd / "away")
    os.symlink("run/nothing/here", odd / "etc" / "resolv.conf")
    os.symlink("/opt/data", odd / "data")
    held = make(
        sandbox, str(odd),
        Bind("/etc/hostname", "/etc/resolv.conf"),
        Bind("/etc", "/up/etc"),
        Bind("/etc", "/away/etc"),
        Bind("/etc", "/data/etc"),
        Bind("/etc/hostname", "/new/deep/name"),
        links=[("/x", f"{LIBRARIES}/libx.so"), ("y", "/opt/data/hello.txt")],
    )  # fmt: skip
    assert list(outside.iterdir()) == []
    code = (
        "import os; print(open('/etc/resolv.conf').read() == open('/new/deep/name').read(),"
        f" os.listdir('/opt/data/etc') != [], os.readlink('{LIBRARIES}/libx.so'),"
        " open('/opt/data/hello.txt').read().strip(), [name for name in os.listdir('/') if name.startswith('.')])"
    )
    assert python(held, code) == "True True /x from the image []"
    assert not (odd / "new").exists() and os.readlink(odd / "etc" / "resolv.conf") == "run/nothing/here"


def test_a_link_into_proc_does_not_lead_out(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    """While places are made nothing of the node's /proc is there that a link could lead through."""
    odd = tmp_path / "odd"
    shutil.copytree(root, odd, symlinks=True)
    os.rmdir(odd / "home")
    os.symlink("/proc/self/root", odd / "home")
    os.symlink("/proc/1/root" + str(tmp_path), odd / "way")
    held = make(sandbox, str(odd), Bind("/etc", "/home/made/etc"), Bind("/etc", "/way/made/etc"))
    assert (
        python(held, "import os; print(os.path.isdir('/home/made/etc'), os.path.isdir('/way/made/etc'))")
        == "True True"
    )
    assert not os.path.exists("/made") and not (tmp_path / "made").exists()


def test_nothing_is_made_in_directories_of_the_node(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    with pytest.raises(ConfigError, match="does not exist in a directory of the node"):
        make(sandbox, root, Bind(str(tmp_path), "/data"), Bind("/etc", "/data/node/new"))
    assert list((tmp_path / "node").iterdir()) == []


WITHOUT_OVERLAY = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[3])
from bootseer.linux import mount as kernel; from bootseer.linux import namespaces
namespaces.separate()
top, root = sys.argv[1:3]
# The kernel lays no overlay over two of them.
kernel.mount("x", top, "tmpfs", 0)
lower = root
for number in range(2):
    for name in ("upper", "work", "merged"):
        os.makedirs(f"{top}/{number}/{name}")
    options = f"lowerdir={lower},upperdir={top}/{number}/upper,workdir={top}/{number}/work"
    kernel.mount("x", f"{top}/{number}/merged", "overlay", 0, options)
    lower = f"{top}/{number}/merged"
from bootseer.mounts.sandbox.binds import Bind
from bootseer.mounts.sandbox.root import RootSpec, make_root
binds = [Bind("/etc/hostname", "/etc/resolv.conf"), Bind("/etc", "/deep/er/etc"), Bind("/etc", "/opt/more/etc"),
         Bind("/dev", "/dev"), Bind("/proc", "/proc")]
made = make_root(RootSpec([lower], binds=binds, users=["a:x:5:5::/:/"], groups=["a:x:5:"]))
print(made.has_overlay, made.notes, flush=True)
os.execv("/usr/local/bin/python3", ["python3", "-c", '''
import os
print(open("/etc/resolv.conf").read() == open("/deep/er/etc/hostname").read())
print(open("/opt/data/hello.txt").read().strip(), sorted(os.listdir("/opt")), os.path.isdir("/opt/more/etc"))
print([line.split(":")[0] for line in open("/etc/passwd")])
for path in ("/opt/data/hello.txt", "/opt/data/new", "/new", "/etc/new", "/usr/new"):
    try:
        open(path, "a")
    except OSError as error:
        print(error.errno, end=" ")
    else:
        print("written", path)
'''])
"""


def test_without_an_overlay_the_image_is_shown_as_it_is(root: str, tmp_path: Path) -> None:
    top = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_OVERLAY, tmp_path, root, top], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("False") and "are read-only" in lines[0]
    assert lines[1] == "True"
    assert lines[2] == "from the image ['data', 'more'] True"
    assert lines[3] == "['a', 'root', 'imageuser']"
    assert lines[4] == "30 30 30 30 30 "  # EROFS


def test_mounts_that_come_later(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    """Visible by themselves where the node shares its mounts, else carried inside."""
    from bootseer.linux import mount as kernel
    from bootseer.linux import namespaces

    later = tmp_path / "later"
    later.mkdir()
    held = make(sandbox, root, Bind(str(tmp_path), str(tmp_path)))
    try:
        for content in ("one", "two"):
            kernel.mount("bootseer", str(later), "tmpfs", 0)
            (later / "file").write_text(content)
            path = str(later / "file")
            if sandbox.look([path]):
                fd = namespaces.copy_mount(str(later))
                try:
                    sandbox.attach(str(later), fd)
                finally:
                    os.close(fd)
            assert sandbox.look([path]) == []
            assert inside(held, "cat", path).stdout == content
            kernel.unmount(str(later))
    finally:
        kernel.clear(str(later))
    assert sandbox.look(
        [str(tmp_path), "/etc/machine-id" if os.path.exists("/etc/machine-id") else "/etc/hostname"]
    )


def lay(sandbox: ImageSandbox, text: str, *directories: Path) -> str:
    """The door to where a file `new` with this text lies over each of the folders."""
    scratch = directories[0].parent.parent / text
    found = []
    for directory in directories:
        (scratch / directory.name).mkdir(parents=True)
        (scratch / directory.name / "new").write_text(text)
        found.append(Layer(os.fspath(scratch / directory.name), os.fspath(directory)))
    return sandbox.lay(LayersSpec(found, os.fspath(scratch)))


def test_an_environment_is_shown_as_a_whole_and_taken_away(
    sandbox: ImageSandbox, root: str, tmp_path: Path
) -> None:
    """Below it is what was there before, also where the folder itself is the node's."""
    seen, own, unseen = tmp_path / "seen/env", tmp_path / "seen/own", tmp_path / "unseen/other"
    for directory in (seen, own, unseen):
        directory.mkdir(parents=True)
        (directory / "old").write_text("old")
    held = make(sandbox, root, Bind(f"{tmp_path}/seen", f"{tmp_path}/seen"), Bind(str(own), str(own)))
    image = OpenImage(sandbox, cast("ImageSource", None), held, EnvironChanges({}, (), {}), [], 0.0)
    directories = [f"{seen}", f"{own}"]

    def found() -> list[list[str]]:
        return json.loads(
            python(held, f"import json, os; print(json.dumps([os.listdir(p) for p in {directories}]))")
        )

    doors = [ImageSandbox() for _ in range(3)]
    try:
        image.show_from(lay(doors[0], "one", seen, own), directories)
        assert [sorted(names) for names in found()] == [["new", "old"]] * 2
        image.show_from(lay(doors[1], "two", seen, own), directories)
        assert inside(held, "cat", f"{seen}/new").stdout == "two"
        image.hide(directories)
        assert found() == [["old"]] * 2
        assert inside(held, "sh", "-c", f"echo set up > {own}/made").returncode == 0
        assert (own / "made").read_text() == "set up\n"
        (own / "made").unlink()
        image.hide(directories)
        assert found() == [["old"]] * 2, "what is the root's own stays"

        third = lay(doors[2], "three", seen, unseen)
        with pytest.raises(StorageError, match=f"{unseen}: cannot be shown inside the image"):
            image.show_from(third, [f"{seen}", f"{unseen}"])
        assert found() == [["old"]] * 2, "all of it is seen, or nothing"
        image.show_from(third, [f"{seen}"])
        doors[2].close()
        with pytest.raises(StorageError, match="the environment cannot be mounted in the image"):
            image.show_from(third, [f"{seen}"])
        assert found() == [["old"]] * 2
    finally:
        for each in doors:
            each.close()


# ---- what is written -------------------------------------------------------------------------------------------


def test_a_directory_of_ours_takes_what_is_written(root: str, tmp_path: Path) -> None:
    for text in ("one", "two"):
        held_by = ImageSandbox()
        try:
            held = make(held_by, root, writable=f"{tmp_path}/made/kept")
            assert inside(held, "sh", "-c", f"echo {text} >> /opt/data/new; cat /opt/data/new").returncode == 0
        finally:
            held_by.close()
    assert (tmp_path / "made/kept/upper/opt/data/new").read_text() == "one\ntwo\n"
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_could_fill_is_refused(sandbox: ImageSandbox, root: str, tmp_path: Path) -> None:
    """Ranks would run their programs."""
    for owner, mode, line in (
        (12345, 0o755, "belongs to user 12345, not to 0"), (0, 0o777, "chmod go-w"), (0, 0o1777, "chmod go-w"),
    ):  # fmt: skip
        directory = tmp_path / f"job-{owner}-{mode:o}"
        (directory / "upper").mkdir(parents=True)
        os.chown(directory, owner, -1)
        directory.chmod(mode)
        with pytest.raises(ConfigError, match=f"--image-writable {directory}: .*{line}"):
            make(sandbox, root, writable=str(directory))
        if not owner:
            (directory / "below").mkdir()
            if not mode & 0o1000:
                with pytest.raises(ConfigError, match=f"--image-writable {directory}/below: .*{line}"):
                    make(sandbox, root, writable=f"{directory}/below")


@pytest.mark.parametrize("name", ["upper", "work"])
def test_a_link_in_the_place_of_a_layer_is_not_followed(
    sandbox: ImageSandbox, root: str, tmp_path: Path, name: str
) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "kept").mkdir(mode=0o700)
    (tmp_path / "kept" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=f"`{name}` in it is not a directory"):
        make(sandbox, root, writable=f"{tmp_path}/kept")
    assert (tmp_path / "victim").stat().st_mode & 0o777 == 0o700


# ---- one that does not answer ----------------------------------------------------------------------------------


def test_a_sandbox_that_hangs_is_an_error_and_ends(root: str) -> None:
    sandbox = ImageSandbox(ask_s=0.5)
    os.kill(sandbox.pid, signal.SIGSTOP)
    pid = sandbox.pid
    with pytest.raises(StorageTimeout, match=r"has not answered for 0\.5 s"):
        make(sandbox, root)
    with pytest.raises(StorageError, match="has ended"):
        make(sandbox, root)
    sandbox.close()
    assert not os.path.exists(f"/proc/{pid}")


# ---- one program, other tools --------------------------------------------------------------------------------


def test_one_program(root: str, tmp_path: Path) -> None:
    """In a process of its own, as it forks and handles signals."""
    code = (
        "import sys\nfrom bootseer.mounts.sandbox.image_root import ImageRequest\n"
        "from bootseer.mounts.sandbox.run import run_in_image\n"
        "from bootseer.logs import send_to\nsend_to(print)\n"
        f"request = ImageRequest('rootfs:{root}', work=[{str(tmp_path)!r}], environ={{'A': '1'}})\n"
        "print(run_in_image(request, sys.argv[1:]).status)\n"
    )
    for argv, output in (
        (["sh", "-c", "echo $A; exit 3"], "1\n3\n"), (["sh", "-c", "kill -9 $$"], "137\n"), (["nothing"], "127\n"),
    ):  # fmt: skip
        run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=tmp_path)
        assert run.stdout == output, run.stderr
    with pytest.raises(BootseerError, match="no program is given"):
        run_in_image(ImageRequest(f"rootfs:{root}"), [])


def test_a_mounted_tree_is_a_root_for_runc(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("runc") is None:
        support.lacking("runc is not installed")
    need_mounts()
    for name in ("RUNTIME", "CACHE"):
        monkeypatch.setenv(f"BOOTSEER_{name}", f"{tmp_path}/{name.lower()}")
    whole = tmp_path / "whole"
    shutil.copytree(root, whole, symlinks=True)
    for name in ("proc", "sys", "dev"):
        (whole / name).mkdir()  # other tools make no places in what cannot be written to
    files: dict[str, bytes] = {}
    built = build(
        DirectorySource(str(whole)), lambda digest, data: files.__setitem__(f"packs/{digest}", data), threads=1
    )
    files[f"index/{built.digest}"] = built.index_bytes
    with FaultyHttpServer(files) as server:
        tree = mount_tree(f"{server.url}@sha256:{built.digest}")
        try:
            with tree.hold():
                run = run_runc(tree.folder, tmp_path)
        finally:
            unmount_tree(built.digest, force=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ID=made" in run.stdout


TELL = [
    "/usr/local/bin/python3",
    "-c",
    "import ssl, json; print(open('/etc/os-release').read())".replace("ssl, ", ""),
]


def run_runc(directory: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    subprocess.run(["runc", "spec"], cwd=bundle, check=True)
    config = json.loads((bundle / "config.json").read_text())
    config["root"] = {"path": directory, "readonly": True}
    config["process"].update(terminal=False, args=TELL)
    config["linux"]["cgroupsPath"] = f"/bootseer-test-{os.getpid()}"
    (bundle / "config.json").write_text(json.dumps(config))
    return subprocess.run(
        ["runc", "--root", str(tmp_path / "runc"), "run", "--no-pivot", f"bootseer-test-{os.getpid()}"],
        cwd=bundle, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
