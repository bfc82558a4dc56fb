"""Saves through a mount: what becomes a version, when, and what never does."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.integration import mounting
from tests.integration.mounting import Mount, Mounted, expected, is_mounted
from tests.support import wait_until

mount = mounting.mount  # the fixture
pytestmark = pytest.mark.system
MIB = 1 << 20
OPENAT = "257" if platform.machine() == "x86_64" else "56"


def write(at: Mounted, name: str, data: bytes = b"data") -> None:
    os.makedirs(os.path.dirname(at.path(name)), exist_ok=True)
    with open(at.path(name), "wb") as file:
        file.write(data)


def python(text: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def links(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    directory = f"/proc/{pid}/fd"
    return [os.readlink(f"{directory}/{fd}") for fd in os.listdir(directory)]


def ended(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=20)
    return process.returncode


def test_file_at_the_top_is_a_version_when_it_is_closed(mount: Mount) -> None:
    at = mount({"old.pt": 10}, writable=True)
    with open(at.path("model-10.pt"), "wb") as file:
        file.write(b"a" * 3 * MIB)
        file.flush()
        assert at.versions() == []
        assert at.read("model-10.pt") == b"a" * 3 * MIB, "programs see it at once"
        file.seek(5)
        file.write(b"b")  # formats go back to fill in lengths
    wait_until(at.versions, 10)
    assert at.versions() == ["01-step10"]
    want = b"aaaaab" + b"a" * (3 * MIB - 6)
    assert at.saved("01-step10") == {"model-10.pt": want}
    assert at.read("model-10.pt") == want
    assert at.read("old.pt") == expected("old.pt", 10)
    assert os.getxattr(at.path("model-10.pt"), "user.bootseer.version") == b"01-step10"


def test_rename_over_the_final_name_is_the_commit(mount: Mount) -> None:
    at = mount(writable=True)
    for number in (1, 2):
        write(at, "model.pt.tmp", b"%d" % number * 5000)
        os.replace(at.path("model.pt.tmp"), at.path("model.pt"))
        assert len(at.versions()) == number, "when the rename returns it is there"
        assert at.saved(at.versions()[-1]) == {"model.pt": b"%d" % number * 5000}
        assert at.read("model.pt") == b"%d" % number * 5000
    assert os.listdir(at.folder) == ["model.pt"]


def test_fsync_of_a_closed_file_waits_for_its_version(mount: Mount) -> None:
    at = mount(writable=True)
    write(at, "model.pt")
    fd = os.open(at.path("model.pt"), os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert at.versions() == ["01"]


def test_directory_is_a_version_when_somebody_says_so(mount: Mount) -> None:
    at = mount(writable=True)
    write(at, "step-20/rank0/model.pt", b"0")
    write(at, "step-20/rank1/model.pt", b"1")
    subprocess.run(["touch", at.path("step-20/.commit")], check=True)
    assert at.versions() == ["01-step20"]
    assert at.saved("01-step20") == {"step-20/rank0/model.pt": b"0", "step-20/rank1/model.pt": b"1"}
    # A file that comes late makes a whole version again, with all that was there.
    write(at, "step-20/late", b"2")
    subprocess.run(["touch", at.path("step-20/.commit")], check=True)
    assert at.saved("02-step20") == {**at.saved("01-step20"), "step-20/late": b"2"}
    subprocess.run(["touch", at.path("step-20/.commit")], check=True)
    assert len(at.versions()) == 2, "nothing was new"


def test_temporary_directory_is_a_version_when_it_gets_its_name(mount: Mount) -> None:
    at = mount(writable=True, settle_s=0.2)
    write(at, "tmp-checkpoint-5/model.safetensors")
    write(at, "tmp-checkpoint-5/optimizer.pt")
    os.rename(at.path("tmp-checkpoint-5"), at.path("checkpoint-5"))
    assert at.versions() == ["01-step5"]
    assert at.saved("01-step5").keys() == {"checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt"}


def test_directory_in_which_nothing_changes_is_complete(mount: Mount) -> None:
    at = mount(writable=True, settle_s=0.3)
    os.mkdir(at.path("step-1"))
    with open(at.path("step-1/b"), "wb") as file:
        write(at, "step-1/a")
        file.write(b"b")
        write(at, "step-2/model-00001-of-00002.safetensors")
        write(at, "step-3/__0_0.distcp")
        assert at.versions() == []
    wait_until(at.versions, 10)
    assert at.versions() == ["01-step1"], "the shards of 2 and the metadata of 3 are missing"
    assert at.saved("01-step1") == {"step-1/a": b"data", "step-1/b": b"b"}
    write(at, "step-2/model-00002-of-00002.safetensors")
    wait_until(lambda: len(at.versions()) == 2, 10)
    write(at, "step-3/.metadata.tmp")
    os.rename(at.path("step-3/.metadata.tmp"), at.path("step-3/.metadata"))
    assert at.versions()[2:] == ["03-step3"], "DCP's last act"
    assert at.saved("03-step3").keys() == {"step-3/__0_0.distcp", "step-3/.metadata"}


def test_parts_at_the_top_are_one_save(mount: Mount) -> None:
    at = mount(writable=True, settle_s=0.3)
    write(at, "config.json", b"{}")
    write(at, "model-00001-of-00002.safetensors")
    write(at, "other.pt")
    wait_until(at.versions, 10)
    assert at.saved("01").keys() == {"config.json", "other.pt"}
    write(at, "model-00002-of-00002.safetensors")
    wait_until(lambda: len(at.versions()) == 2, 10)
    assert at.saved("02").keys() == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_metadata_of_savers_on_other_nodes_completes_nothing(mount: Mount) -> None:
    """Each node's mount has the files of its own ranks only."""
    at = mount(writable=True, settle_s=0.0)
    for directory in ("step-4/", ""):
        write(at, f"{directory}__0_0.distcp")
        write(at, f"{directory}.metadata.tmp", b"\x80\x04 __0_0.distcp and __1_0.distcp")
        os.rename(at.path(f"{directory}.metadata.tmp"), at.path(f"{directory}.metadata"))
        assert at.versions() == []
    assert any("names __1_0.distcp, which is not here" in line for line in at.log)
    write(at, "__1_0.distcp")
    write(at, ".metadata", b"__0_0.distcp __1_0.distcp")
    wait_until(at.versions, 10)
    assert at.saved("01").keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    at.end()
    assert at.versions() == ["01"]


def test_pointer_that_names_a_directory_says_that_it_is_complete(mount: Mount) -> None:
    """DeepSpeed and Megatron; the pointer is in the version as well."""
    at = mount(writable=True, settle_s=3600.0)
    write(at, "args.json", b"{}")
    write(at, "iter_0000020/mp_rank_00/model.pt")
    write(at, "latest_checkpointed_iteration.txt", b"20")
    wait_until(at.versions, 10)
    assert at.versions() == ["01-step20"]
    assert at.saved("01-step20").keys() == {
        "args.json",
        "iter_0000020/mp_rank_00/model.pt",
        "latest_checkpointed_iteration.txt",
    }


def test_nothing_is_a_version_by_itself_without_settling(mount: Mount) -> None:
    at = mount(writable=True, settle_s=None)
    write(at, "model.pt")
    write(at, "optimizer.pt")
    write(at, "x.tmp", b"x")
    os.rename(at.path("x.tmp"), at.path("x.pt"))
    assert at.versions() == []
    write(at, ".commit", b"")
    assert at.versions() == ["01"]
    assert at.saved("01").keys() == {"model.pt", "optimizer.pt", "x.pt"}


KILLED = """
import os, signal, sys
file = open(sys.argv[1], "wb")
file.write(b"half" * 100_000)
file.flush()
if sys.argv[2] == "fork" and not os.fork():
    os._exit(0)  # a child that had it open as well ends well
if sys.argv[2] == "error":
    os._exit(3)
os.kill(os.getpid(), signal.SIGTERM if sys.argv[2] == "term" else signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["kill", "term", "error", "fork"])
def test_saver_that_dies_leaves_no_version(mount: Mount, how: str) -> None:
    at = mount(writable=True, settle_s=0.0)
    write(at, "good.pt")
    wait_until(at.versions, 10)
    os.mkdir(at.path("step-9"))
    with open(at.path("step-9/whole.pt"), "wb"):  # so that the folder is not complete before
        for name in ("half.pt", "step-9/half.pt"):
            assert ended(python(KILLED, at.path(name), how)) != 0
    os.rename(at.path("half.pt"), at.path("half.pt.tmp"))
    os.rename(at.path("half.pt.tmp"), at.path("half.pt"))
    with pytest.raises(OSError) as caught:
        open(at.path("step-9/.commit"), "w").close()
    assert caught.value.errno == errno.EIO
    assert at.versions() == ["01"]
    write(at, "step-9/half.pt", b"written again")
    open(at.path("step-9/.commit"), "w").close()
    assert at.saved("02-step9")["step-9/half.pt"] == b"written again"
    at.end()
    assert len(at.versions()) == 2
    assert any("half.pt" in line and "not saved" in line for line in at.log), at.log


def test_program_that_ends_well_without_closing(mount: Mount) -> None:
    at = mount(writable=True)
    with open(at.path("out.pt"), "wb") as file:
        subprocess.run([sys.executable, "-c", "print('text')"], stdout=file, check=True)
    subprocess.run(["sh", "-c", f"{sys.executable} -c 'print(1)' > {at.path('shell.pt')}"], check=True)
    wait_until(lambda: len(at.versions()) == 2, 10)
    assert {name for version in at.versions() for name in at.saved(version)} == {"out.pt", "shell.pt"}


def test_store_that_fails_is_reported_and_tried_again(mount: Mount) -> None:
    at = mount(writable=True)
    at.fault("fail")
    write(at, "a.tmp")
    with pytest.raises(OSError) as caught:
        os.rename(at.path("a.tmp"), at.path("a.pt"))
    assert caught.value.errno == errno.EIO
    write(at, "step-1/b")
    with pytest.raises(OSError):
        open(at.path("step-1/.commit"), "w").close()
    assert at.read("a.pt") == b"data"
    at.heal("fail")
    open(at.path("step-1/.commit"), "w").close()
    at.end()
    assert {name for version in at.versions() for name in at.saved(version)} == {"a.pt", "step-1/b"}
    assert any("the store is gone" in line for line in at.log)


def test_open_file_cannot_be_committed(mount: Mount) -> None:
    at = mount(writable=True, settle_s=0.0)
    os.mkdir(at.path("step-1"))
    with open(at.path("step-1/a"), "wb") as file:
        with pytest.raises(OSError) as caught:
            open(at.path("step-1/.commit"), "w").close()
        assert caught.value.errno == errno.EBUSY
        file.write(b"all of it")
    wait_until(at.versions, 10)
    assert at.saved("01-step1") == {"step-1/a": b"all of it"}


def test_changes_while_a_version_is_made_wait(mount: Mount) -> None:
    at = mount(writable=True)
    write(at, "step-1/a", b"1")
    at.fault("hang")
    commit = python("import sys; open(sys.argv[1], 'w').close()", at.path("step-1/.commit"))
    wait_until(lambda: os.path.exists(f"{at.control}/saving"), 10)
    change = python("import sys; open(sys.argv[1], 'w').write('2')", at.path("step-1/a"))
    wait_until(lambda: _is_waiting(change.pid, at.path("step-1/a")), 10)
    write(at, "step-2/b", b"other saves go on")
    assert at.read("step-1/a") == b"1"
    at.heal("hang")
    assert (ended(commit), ended(change)) == (0, 0)
    assert at.saved("01-step1") == {"step-1/a": b"1"}
    assert at.read("step-1/a") == b"2"


def _is_waiting(pid: int, path: str) -> bool:
    """Whether a process is in the call that opens a file."""
    with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
        number, *arguments = file.read().split()
    if number != OPENAT:
        return False
    try:
        with open(f"/proc/{pid}/mem", "rb") as file:
            file.seek(int(arguments[1], 16))
            return file.read(len(path)) == path.encode()
    except OSError:
        return False  # it was another call, which is over


def test_what_is_changed_and_removed(mount: Mount) -> None:
    at = mount({"base/a": 5 * MIB, "base/b": 3, "model.pt": 10}, writable=True, spool_bytes=2 * MIB)
    with open(at.path("base/a"), "r+b") as file:
        file.seek(MIB)
        file.write(b"changed")
    want = bytearray(expected("base/a", 5 * MIB))
    want[MIB : MIB + 7] = b"changed"
    assert at.read("base/a") == want
    os.truncate(at.path("base/b"), 2)
    with open(at.path("base/b"), "ab") as file:
        assert file.tell() == 2
        file.write(b"more")
    open(at.path("base/.commit"), "w").close()
    assert at.saved("01") == {"base/a": bytes(want), "base/b": expected("base/b", 3)[:2] + b"more"}
    subprocess.run(["rm", "-r", at.path("base")], check=True)
    os.unlink(at.path("model.pt"))
    assert os.listdir(at.folder) == []
    at.end()
    assert at.versions() == ["01"], "what was only removed from is no version"


def test_names(mount: Mount) -> None:
    at = mount(writable=True, settle_s=None)
    write(at, "a/x", b"x")
    write(at, "b/y", b"y")
    subprocess.run(["mv", "-n", at.path("a/x"), at.path("b/y")])
    assert at.read("b/y") == b"y"
    with pytest.raises(OSError, match="Directory not empty"):
        os.rmdir(at.path("a"))
    with pytest.raises(OSError, match="Directory not empty"):
        os.rename(at.path("a"), at.path("b"))
    with pytest.raises(OSError, match="Invalid argument"):
        os.rename(at.path("a"), at.path("a/inside"))
    os.mkdir(at.path("c"))
    os.rename(at.path("a"), at.path("c"))
    assert at.read("c/x") == b"x"
    with pytest.raises(FileExistsError):
        os.mkdir(at.path("c"))
    with pytest.raises(FileExistsError):
        os.open(at.path("c/x"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    with open(at.path("c/x"), "rb") as file:
        os.unlink(at.path("c/x"))
        assert file.read() == b"x", "an open file outlives its name"
        assert os.fstat(file.fileno()).st_nlink == 0
    os.utime(at.path("b/y"), ns=(10**18, 10**18))
    assert os.stat(at.path("b/y")).st_mtime_ns == 10**18
    assert os.listdir(at.path("c")) == []


def test_more_than_fits_in_memory_goes_to_the_disk(mount: Mount, tmp_path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    at = mount(writable=True, spool_bytes=4 * MIB, spool_directory=os.fspath(spool))
    data = os.urandom(7 * MIB)
    for name in ("a", "b"):
        write(at, f"step-1/{name}", data)
    assert os.listdir(spool) == [], "without a name: a crash leaves nothing"
    assert [
        os.readlink(f"/proc/{at.program.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{at.program.pid}/fd")
    ] != []
    open(at.path("step-1/.commit"), "w").close()
    assert at.saved("01-step1") == {"step-1/a": data, "step-1/b": data}
    left = [link for link in links(at.program.pid) if link.startswith(os.fspath(spool)) or "memfd" in link]
    assert left == []


def test_only_the_newest_are_kept(mount: Mount) -> None:
    at = mount({"base.pt": 5}, writable=True, keep=2)
    for step in (1, 2, 3):
        write(at, f"step-{step}/model.pt")
        open(at.path(f"step-{step}/.commit"), "w").close()
    assert sorted(os.listdir(at.folder)) == ["step-2", "step-3"]


def test_what_is_complete_at_the_end_is_saved(mount: Mount) -> None:
    at = mount(writable=True, settle_s=3600.0)
    write(at, "step-1/model.pt")
    write(at, "step-2/model-1-of-2.pt")
    write(at, "step-3.tmp/model.pt")
    write(at, "model.pt")
    fd = os.open(at.path("open.pt"), os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"not closed")
    at.end()
    with pytest.raises(OSError):
        os.close(fd)
    names = {name for version in at.versions() for name in at.saved(version)}
    assert names == {"step-1/model.pt", "model.pt"}
    for name in ("step-2", "step-3.tmp", "open.pt"):
        assert any(line.startswith(f"bootseer mount: {name}: not saved: ") for line in at.log), at.log


def test_unmount_from_outside_saves_as_well(mount: Mount) -> None:
    at = mount(writable=True, settle_s=3600.0)
    write(at, "step-1/model.pt")
    subprocess.run(["fusermount3", "-u", at.folder], check=True)
    assert at.program.wait(15).status == 0
    assert at.versions() == ["01-step1"]


def test_second_signal_ends_it_at_once(mount: Mount) -> None:
    at = mount(writable=True, settle_s=3600.0)
    write(at, "step-1/model.pt")
    at.fault("hang")
    at.program.signal(signal.SIGTERM)
    wait_until(lambda: not is_mounted(at.folder), 10)
    wait_until(lambda: at.program.signal(signal.SIGTERM) or at.program.process.poll() is not None, 15)
    assert at.versions() == []
    assert json.dumps(at.log) == "[]"
