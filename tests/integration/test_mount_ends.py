"""How mounts begin and end: refused ones, signals, a daemon that is killed, other users, the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from tests.integration import mounting
from tests.integration.mounting import SERVER, TOP, Mount, expected, is_mounted, need_fuse
from tests.support import wait_until

mount = mounting.mount  # the fixture
pytestmark = pytest.mark.system
MIB = 1 << 20


def settings(directory: str, control: str) -> str:
    return json.dumps(
        {
            "files": {"file": [10, 0]},
            "folder": directory,
            "control": control,
            "versions": "",
            "latency_s": 0,
            "keep": None,
            "options": {},
        }
    )


def refusal(program, directory: str, **environ: str | None) -> str:
    """The last line of a mount that was refused."""
    run = program(sys.executable, SERVER, settings(directory, "/nowhere"), env={"PYTHONPATH": TOP, **environ})
    assert run.status == 1
    return run.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_unmounts(mount: Mount, number: int) -> None:
    at = mount({"file": 10})
    assert at.read("file") == expected("file", 10)
    at.program.signal(number)
    assert at.program.wait(10).status == 0
    assert not is_mounted(at.folder)
    assert os.listdir(at.folder) == []


def test_signal_ends_it_while_readers_wait_for_a_store_that_hangs(mount: Mount) -> None:
    at = mount({"file": 8 * MIB})
    at.fault("hang")
    caught: list[int | None] = []

    def read() -> None:
        try:
            at.read("file")
        except OSError as error:
            caught.append(error.errno)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    wait_until(lambda: any(each.is_alive() for each in readers))
    at.program.signal(signal.SIGTERM)
    wait_until(lambda: not is_mounted(at.folder), 10)
    for reader in readers:
        reader.join()
    assert len(caught) == 4
    assert set(caught) <= {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}
    at.heal("hang")
    assert at.program.wait(10).status == 0


def test_daemon_that_is_killed(mount: Mount, program) -> None:
    at = mount({"file": 8 * MIB}, writable=True)
    with open(at.path("saved.pt"), "wb") as file:
        file.write(b"half")
    fd = os.open(at.path("file"), os.O_RDONLY)
    assert os.pread(fd, 10, 0) == expected("file", 8 * MIB)[:10]
    at.program.signal(signal.SIGKILL)
    at.program.wait(10)
    for call in (lambda: os.pread(fd, MIB, 6 * MIB), lambda: os.close(fd)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert at.versions() == []
    with pytest.raises(OSError, match="not connected"):
        os.listdir(at.folder)
    said = refusal(program, at.folder)
    assert f"clean it up with: fusermount3 -u -z {at.folder}" in said
    subprocess.run(["fusermount3", "-u", "-z", at.folder], check=True)
    assert not is_mounted(at.folder)
    assert os.listdir(at.folder) == []


def test_directories_that_cannot_be_mounted_at(mount: Mount, program, tmp_path) -> None:
    at = mount({"file": 10})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "of").write_text("things")
    (tmp_path / "plain").write_text("")
    for name, says in (
        ("absent", "no such directory"),
        ("full", "is not empty"),
        ("plain", "is not a directory"),
        (os.path.basename(at.folder), "is a mount point already"),
    ):
        run = program(
            *(sys.executable, SERVER, settings(os.fspath(tmp_path / name), "/nowhere")), env={"PYTHONPATH": TOP}
        )
        assert run.status == 1
        assert run.stderr.strip().splitlines()[-1].startswith("bootseer.errors.ConfigError: ")
        assert f"{tmp_path / name}: {says}" in run.stderr
    assert at.read("file") == expected("file", 10)


IN_NAMESPACE = """
set -e
mount -t tmpfs none /dev/shm
mknod -m "$1" /dev/shm/fuse c 10 229
{device}
shift
exec "$@"
"""


def run_in_namespace(device: str, mode: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with another /dev/fuse, in a mount namespace of its own."""
    script = IN_NAMESPACE.format(device=device)
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", mode, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": TOP},
        timeout=30,
    )


AS_ANOTHER = """
import json, os, subprocess, sys
server = subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
folder = json.loads(sys.argv[2])["folder"]
assert server.stdout.readline() == "ready\\n"
with open(folder + "/file", "rb") as file:
    print(len(file.read()), os.getuid(), os.stat(folder + "/file").st_uid)
subprocess.run(["fusermount3", "-u", folder], check=True)
print(server.wait(10))
"""


def test_user_without_privileges() -> None:
    """Another user than root mounts by fusermount3. It may read all files, for the interpreter may be root's."""
    need_fuse()
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        directory, control = os.path.join(base, "mnt"), os.path.join(base, "control")
        for path in (directory, control):
            os.mkdir(path)
            os.chown(path, 65534, 65534)
        caps = "-all,+dac_override,+dac_read_search"
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        user += ["--inh-caps", caps, "--ambient-caps", caps]
        run = run_in_namespace(
            "mount --bind /dev/shm/fuse /dev/fuse",
            "666",
            *(*user, sys.executable, "-c", AS_ANOTHER, SERVER, settings(directory, control)),
        )
        assert run.stdout.split() == ["10", "65534", "65534", "0"], run.stderr


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("mount -t tmpfs none /dev; ", "/dev/fuse is missing: load the kernel's module (modprobe fuse)"),
        ("mount --bind /dev/shm/fuse /dev/fuse", "/dev/fuse: permission denied for this user"),
    ],
)
def test_device_that_is_missing_or_not_ours(tmp_path, device: str, says: str) -> None:
    need_fuse()
    (tmp_path / "mnt").mkdir()
    asked = settings(os.fspath(tmp_path / "mnt"), "/nowhere")
    # Root without its privileges is as anybody else.
    drop = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    run = run_in_namespace(device, "000", *drop, sys.executable, SERVER, asked)
    assert says in run.stderr, run.stderr
    assert len(run.stderr.strip().splitlines()[-1]) < 400


def test_container_that_may_not_mount(tmp_path) -> None:
    need_fuse()
    (tmp_path / "mnt").mkdir()
    asked = settings(os.fspath(tmp_path / "mnt"), "/nowhere")
    argv = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, SERVER, asked]
    environ = {**os.environ, "PYTHONPATH": TOP}
    run = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=30)
    assert run.returncode == 1
    said = run.stderr.strip().splitlines()[-1]
    assert "could not be mounted: fusermount3: mount failed: Operation not permitted; a container needs" in said


def test_libfuse_that_is_missing(program, tmp_path) -> None:
    need_fuse()
    (tmp_path / "mnt").mkdir()
    said = refusal(program, os.fspath(tmp_path / "mnt"), FUSE_LIBRARY_NAME="no-such-library")
    assert "libfuse3 was not found: install fuse3" in said


CHECKPOINT = """
import os, sys, torch
from bootseer.checkpoint.mounting import mount_checkpoint
url, folder, log = sys.argv[1:]
state = {"w": torch.arange(100_000), "step": 7}
log = mount_checkpoint(url, folder, writable=True, foreground=False, log_path=log, keep=2)
for step in (7, 8, 9):
    torch.save(state, f"{folder}/model.pt.tmp")
    os.replace(f"{folder}/model.pt.tmp", f"{folder}/step-{step}.pt")
assert sorted(os.listdir(folder)) == ["step-8.pt", "step-9.pt"]  # keep=2
assert torch.equal(torch.load(f"{folder}/step-9.pt")["w"], state["w"])
import torch.distributed.checkpoint as dcp
dcp.save({"w": state["w"]}, checkpoint_id=f"{folder}/step-8", no_dist=True)
assert os.getxattr(f"{folder}/step-8", "user.bootseer.version")
got = {"w": torch.zeros(100_000, dtype=torch.int64)}
dcp.load(got, checkpoint_id=f"{folder}/step-8", no_dist=True)
assert torch.equal(got["w"], state["w"])
torch.save(state, f"{folder}/step-9.pt")
fd = os.open(f"{folder}/step-9.pt", os.O_RDONLY)
os.fsync(fd)
os.close(fd)
try:
    mount_checkpoint(url, folder, foreground=False)
except Exception as error:
    print(error)
"""


def test_checkpoint_in_the_background(tmp_path, program) -> None:
    """The whole way: torch.save into a mount, versions in a store, and a mount of the newest one."""
    need_fuse()
    directory, store, log = (os.fspath(tmp_path / name) for name in ("mnt", "store", "log"))
    os.mkdir(directory)
    try:
        argv = (sys.executable, "-c", CHECKPOINT, "store", directory, log)
        run = program(*argv, env={"PYTHONPATH": TOP}, cwd=os.fspath(tmp_path), deadline_s=60)
        assert run.status == 0, run.stderr
        assert f"{directory}: is a mount point already" in run.stdout
        versions = sorted(name for name in os.listdir(store) if name.startswith("v-"))
        assert len(versions) == 2
        with open(os.path.join(store, versions[-1], "manifest.json"), "rb") as file:
            manifest = json.loads(file.readline())
        assert (manifest["step"], [each["path"] for each in manifest["files"]]) == (9, ["step-9.pt"])
        subprocess.run(["fusermount3", "-u", directory], check=True)
        with open(log, encoding="utf-8") as file:
            assert "step-9.pt: saved as " in file.read()
        serve = """if True:
            import sys
            from bootseer.checkpoint.mounting import mount_checkpoint
            mount_checkpoint(sys.argv[1], sys.argv[2], on_ready=lambda: print("ready", flush=True))
        """
        again = program.start(sys.executable, "-c", serve, store, directory, env={"PYTHONPATH": TOP})
        wait_until(lambda: "ready" in again.stdout or again.process.poll() is not None, 20)
        assert os.listdir(directory) == ["step-9.pt"]
        with open(os.path.join(directory, "step-9.pt"), "rb") as file:
            whole = file.read()
        again.signal(signal.SIGTERM)
        assert again.wait(10).status == 0
        damage(os.path.join(store, versions[-1], "00000.s000"))
        again = program.start(sys.executable, "-c", serve, store, directory, env={"PYTHONPATH": TOP})
        wait_until(lambda: "ready" in again.stdout or again.process.poll() is not None, 20)
        with pytest.raises(OSError) as caught:
            shutil.copyfile(os.path.join(directory, "step-9.pt"), tmp_path / "copy")
        assert caught.value.errno == errno.EIO
        assert whole and not (tmp_path / "copy").read_bytes()
        again.signal(signal.SIGTERM)
        run = again.wait(10)
        assert run.status == 0
        assert "step-9.pt" in run.stderr and "is damaged" in run.stderr
    finally:
        if is_mounted(directory):
            subprocess.run(["umount", "-l", directory], check=False)


def damage(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
