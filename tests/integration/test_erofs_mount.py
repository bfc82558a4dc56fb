"""Trees through the kernel: every attribute as in the index, layers over them, no zeros when a server ends."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from bootseer.errors import ConfigError, StorageError
from bootseer.linux import mount as kernel
from bootseer.mounts.device.erofs_mount import mount_erofs
from bootseer.mounts.sandbox.overlay import mount_overlay
from bootseer.tree import erofs
from tests.integration import flat_stack
from tests.integration.flat_stack import Stack, need_erofs, need_tool, wait_until_blocked, wait_until_far
from tests.made_trees import (
    TAILS,
    Entry,
    Made,
    Seen,
    everything,
    expected,
    file,
    folder,
    in_directories,
    make,
    materialise,
    observe,
    symlink,
    trees,
    whiteout,
)
from tests.support import lacking, wait_until

stack, data = flat_stack.stack, flat_stack.data
pytestmark = pytest.mark.system

GONE = {"EIO", "SIGBUS", "ENOTCONN", "ECONNABORTED"}
HOW = ("buffered", "mapped")


@pytest.fixture(scope="module", autouse=True)
def needed(tmp_path_factory: pytest.TempPathFactory) -> None:
    need_erofs(tmp_path_factory.mktemp("probe"))


class Shown:
    """A made tree, mounted over a plain file."""

    def __init__(self, top: Path, made: Made) -> None:
        self.folder = str(top / "shown")
        self.metadata, self.device = str(top / "metadata"), str(top / "device")
        Path(self.metadata).write_bytes(erofs.metadata(made.index, made.digest))
        Path(self.device).write_bytes(made.device)
        os.makedirs(self.folder, exist_ok=True)
        mount_erofs(self.metadata, self.device, self.folder)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """A folder below which nothing stays mounted."""
    yield tmp_path
    kernel.clear(str(tmp_path))


# ---- a tree is what its index says ---------------------------------------------------------------------------


def test_everything(top: Path) -> None:
    made = everything()
    shown = Shown(top, made)
    assert differences(observe(shown.folder), expected(made)) == []
    found = {length: os.stat(f"{shown.folder}/tail{length}").st_size for length in TAILS}
    assert found == {length: length for length in TAILS}, "folders have the sizes that they were made for"
    [mounted] = kernel.mounts_below(shown.folder)
    assert set(mounted.options.split(",")) >= {"ro", "nosuid", "nodev"}
    assert subprocess.run(["losetup", "-j", shown.metadata], capture_output=True).stdout == b""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=trees())
def test_any_tree(top: Path, made: Made) -> None:
    for index in (made.index, in_directories(made.index)):  # the latter as they are built
        shown = Shown(top, made._replace(index=index))
        try:
            assert differences(observe(shown.folder), expected(made)) == []
        finally:
            kernel.unmount(shown.folder)


def test_names_are_found_one_by_one(top: Path) -> None:
    """A lookup searches blocks and then names; a listing does not."""
    made = everything()
    shown = Shown(top, made)
    for entry in range(len(made.index)):
        path = os.path.join(os.fsencode(shown.folder), made.index.path(entry))
        assert os.lstat(path).st_mode == made.index.modes[entry]
    for name in ("many/0000", "many/02000", "many/00000x", "many/~", "many/ ", "tail4096/x", "empty/a"):
        assert not os.path.lexists(f"{shown.folder}/{name}")


def test_as_mkfs_erofs_would_have_it(top: Path) -> None:
    """The same files, made into an image by the other writer, look the same."""
    mkfs = need_tool("mkfs.erofs")
    made = everything(has_extremes=False)
    (top / "files").mkdir()
    materialise(made, str(top / "files"))
    command = [
        mkfs,
        "--quiet",
        "--chunksize=131072",
        f"--blobdev={top}/blob",
        str(top / "theirs"),
        str(top / "files"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (top / "other").mkdir()
    mount_erofs(str(top / "theirs"), str(top / "blob"), str(top / "other"))
    ours, theirs = observe(Shown(top, made).folder), observe(str(top / "other"))
    assert differences(ours, theirs) == []
    assert differences(ours, observe(str(top / "files"))) == []


def test_reads_of_any_kind(stack: Stack) -> None:
    _, path = stack.mount_data()
    readers = [stack.read(path, how, seed=seed, most=60) for seed in range(2) for how in HOW]
    assert {reader.end() for reader in readers} == {"OK"}


def test_devices_and_setuid_have_no_effect(top: Path) -> None:
    shown = Shown(
        top, make([_device(b"null"), file(b"id", Path("/usr/bin/id").read_bytes(), mode=0o4755, uid=1000)])
    )
    with pytest.raises(PermissionError):
        open(f"{shown.folder}/null", "rb").close()
    run = subprocess.run([f"{shown.folder}/id", "-u"], capture_output=True, text=True)
    assert run.stdout.strip() == str(os.geteuid())


def test_what_cannot_be_mounted(top: Path) -> None:
    shown = Shown(top, make([file(b"a", b"a")]))
    other = top / "other"
    other.mkdir()
    for metadata, device, target, why in (
        (f"{top}/none", shown.device, other, f"{top}/none does not exist"),
        (shown.metadata, f"{top}/none", other, f"{top}/none does not exist"),
        (shown.metadata, f"{top}/no,ne", other, f"{top}/no,ne does not exist"),
        (shown.metadata, shown.device, top / "none", "none does not exist"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            mount_erofs(metadata, device, str(target))
        assert "\n" not in str(caught.value)
    Path(top / "zeros").write_bytes(bytes(8192))
    with pytest.raises(StorageError, match="invalid argument; dmesg may show why"):
        mount_erofs(str(top / "zeros"), shown.device, str(other))
    kernel.mount("tmpfs", str(other), "tmpfs", 0)
    (other / "metadata").write_bytes(Path(shown.metadata).read_bytes())
    (top / "third").mkdir()
    with pytest.raises(ConfigError, match="not tmpfs"):
        mount_erofs(str(other / "metadata"), shown.device, str(top / "third"))
    assert len(kernel.mounts_below(str(top))) == 2


def test_paths_with_commas(top: Path) -> None:
    odd = top / "a,b=c:d\\e f"
    odd.mkdir()
    made = make([file(b"a", b"data")])
    shown = Shown(odd, made)
    assert Path(shown.folder, "a").read_bytes() == b"data"


# ---- layers --------------------------------------------------------------------------------------------------


def test_whiteouts_and_opaque_directories_hide_what_is_below(top: Path) -> None:
    below = make([file(b"gone", b"1"), file(b"stays", b"2"), folder(b"d"), file(b"d/hidden", b"3"), folder(b"e"),
                  file(b"e/x", b"4"), file(b"changed", b"5")])  # fmt: skip
    above = make([whiteout(b"gone"), folder(b"d", is_opaque=True), file(b"d/new", b"6"), file(b"changed", b"7"),
                  folder(b"e"), whiteout(b"e/x"), symlink(b"link", b"stays")])  # fmt: skip
    for name in ("below", "above"):
        (top / name).mkdir()
    lowers = [Shown(top / "above", above).folder, Shown(top / "below", below).folder]
    for upper in (False, True):
        merged = _directories(top, f"merged{upper}", f"upper{upper}", f"work{upper}")
        mount_overlay(lowers, merged[0], upper=merged[1] if upper else "", work=merged[2] if upper else "")
        assert {path: seen.size for path, seen in observe(merged[0]).items() if seen.sha256 or seen.target} == {
            b"stays": 1, b"d/new": 1, b"changed": 1, b"link": 5,
        }  # fmt: skip
        assert Path(merged[0], "changed").read_bytes() == b"7"
        assert os.listdir(f"{merged[0]}/e") == []


def test_what_is_written_goes_to_the_upper_directory(top: Path) -> None:
    shown = Shown(top, make([file(b"a", b"tree", mtime_ns=5), folder(b"d"), file(b"d/b", b"x")]))
    merged, upper, work = _directories(top, "merged", "upper", "work")
    mount_overlay([shown.folder], merged, upper=upper, work=work)
    Path(merged, "a").write_bytes(b"changed")
    Path(merged, "new").write_bytes(b"new")
    os.unlink(f"{merged}/d/b")
    os.rmdir(f"{merged}/d")
    assert sorted(os.listdir(merged)) == ["a", "new"]
    assert Path(shown.folder, "a").read_bytes() == b"tree"
    assert sorted(os.listdir(upper)) == ["a", "d", "new"]
    kernel.unmount(merged)
    mount_overlay([shown.folder], merged, upper=upper, work=work)
    assert sorted(os.listdir(merged)) == ["a", "new"]
    [mounted] = kernel.mounts_below(merged)
    assert {"nosuid", "nodev", "rw"} <= set(mounted.options.split(","))


def test_layers_that_only_read(top: Path) -> None:
    one, two, merged = _directories(top, "one", "two", "merged")
    Path(one, "a").write_bytes(b"1")
    Path(two, "a").write_bytes(b"2")
    Path(two, "b").write_bytes(b"2")
    os.mknod(f"{one}/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for lowers, names in (([one], ["a", "null"]), ([one, two], ["a", "b", "null"]), ([two], ["a", "b"])):
        mount_overlay(lowers, merged)
        assert sorted(os.listdir(merged)) == names
        assert Path(merged, "a").read_bytes() == (b"1" if lowers[0] == one else b"2")
        with pytest.raises(OSError) as caught:
            Path(merged, "c").write_bytes(b"")
        assert caught.value.errno == errno.EROFS
        if "null" in names:
            with pytest.raises(PermissionError):
                open(f"{merged}/null", "rb").close()
        [mounted] = kernel.mounts_below(merged)
        assert {"ro", "nosuid", "nodev"} <= set(mounted.options.split(","))
        kernel.unmount(merged)
    Path(one, "d").write_bytes(b"")  # and the folder itself can be written to as before


@pytest.mark.parametrize("name", ["plain", "a:b", "a,b", "a\\b", "a\\,b", "a\\:b", "a b", "ü\n\udcff", "end\\"])
def test_paths_of_all_kinds(top: Path, name: str) -> None:
    lowers = _directories(top, f"1{name}", f"2{name}")
    for number, lower in enumerate(lowers):
        Path(lower, f"in{number}").write_bytes(b"")
    merged, upper, work = _directories(top, f"m{name}", f"u{name}", f"w{name}")
    mount_overlay(lowers, merged, upper=upper, work=work)
    Path(merged, "new").write_bytes(b"")
    assert sorted(os.listdir(merged)) == ["in0", "in1", "new"] and os.listdir(upper) == ["new"]


def test_more_layers_than_fit_into_a_page(top: Path) -> None:
    lowers = _directories(top, *(f"{number:0100d}" for number in range(60)))
    for number, lower in enumerate(lowers):
        Path(lower, str(number)).write_bytes(b"")
    [merged] = _directories(top, "merged")
    mount_overlay(lowers, merged)
    assert len(os.listdir(merged)) == 60


def test_no_layers_from_nowhere(top: Path) -> None:
    one, merged, upper = _directories(top, "one", "merged", "upper")
    for lowers, more in (([f"{top}/none"], {}), ([one, f"{top}/none"], {}), ([one, f"{top}/no,ne"], {}),
                         ([one], {"upper": upper, "work": f"{top}/none"})):  # fmt: skip
        with pytest.raises(ConfigError, match="does not exist"):
            mount_overlay(lowers, merged, **more)
    with pytest.raises(ConfigError, match="does not exist"):
        mount_overlay([one], f"{top}/none")
    assert kernel.mounts_below(str(top)) == []


@pytest.mark.parametrize("owner", [0, 65534])
def test_for_a_user_who_is_root_only_for_himself(top: Path, owner: int) -> None:
    """In a namespace of users overlayfs marks with `user.` attributes, or deleted folders would come back."""
    one, merged, upper, work = _directories(top, "one", "merged", "upper", "work")
    os.makedirs(f"{one}/d/e")
    os.chown(work, owner, owner)
    code = (
        "import os, sys; from bootseer.mounts.sandbox.overlay import *\n"
        "one, merged, upper, work = sys.argv[1:]\n"
        "try: mount_overlay([one], merged, upper=upper, work=work)\n"
        "except StorageError as error: sys.exit(str(error))\n"
        "os.rmdir(merged + '/d/e'); os.rmdir(merged + '/d'); os.mkdir(merged + '/d')\n"
        "print(os.listdir(merged + '/d'))"
    )
    inner = [sys.executable, "-c", code, one, merged, upper, work]
    command = ["unshare", "--user", "--map-root-user", "--mount", *inner]
    run = subprocess.run(command, cwd=flat_stack.TOP, capture_output=True, text=True)
    if "unshare failed" in run.stderr:
        lacking(run.stderr.strip())
    if owner:
        assert run.stderr.startswith(f"{merged}: overlayfs cannot write to {upper}"), "not his folder"
    else:
        assert run.stdout == "[]\n", run.stderr
        assert os.getxattr(f"{upper}/d", "user.overlay.opaque") == b"y"


# ---- over a server -------------------------------------------------------------------------------------------


def over(stack: Stack, *behaviour: str) -> tuple[flat_stack.Server, str]:
    """A server, and the path of the data below an overlay over EROFS over its device."""
    server = stack.serve(*behaviour, metadata=stack.metadata())
    shown, _ = stack.mount_data(server)
    merged, upper, work = stack.folder("merged"), stack.folder("upper"), stack.folder("work")
    mount_overlay([shown], merged, upper=upper, work=work)
    return server, f"{merged}/data"


@pytest.mark.parametrize("behaviour", [["here"], ["here", "late", "late", "twice"]])
def test_exact_bytes_over_a_server(stack: Stack, behaviour: list[str]) -> None:
    server, path = over(stack, *behaviour)
    readers = [
        stack.read(path, how, seed=seed, most=60, uid=uid)
        for seed in range(2)
        for how in HOW
        for uid in (0, 65534)
    ]
    assert {reader.end() for reader in readers} == {"OK"}
    assert kernel.clear(f"{stack.top}") == 3
    assert server.program.process.poll() is None


def test_any_tree_over_a_server(stack: Stack) -> None:
    made = everything()
    for name, content in (("meta", erofs.metadata(made.index, made.digest)), ("dev", made.device)):
        (stack.top / name).write_bytes(content)
    server = stack.serve("here", "late", metadata=str(stack.top / "meta"), file=str(stack.top / "dev"))
    folder = stack.folder()
    mount_erofs(server.metadata_path, server.path, folder)
    assert differences(observe(folder), expected(made)) == []
    kernel.unmount(folder)
    assert server.end()["errors"] == 0


@pytest.mark.parametrize("read_ahead_kib", [128, 8192])
def test_what_cannot_be_read_gives_errors_and_no_zeros(stack: Stack, read_ahead_kib: int) -> None:
    """What is read at once fails as a whole, also where it is much: it is never filled up with zeros."""
    right = stack.data.read_bytes()
    bad = [(1 << 20) + 5, (5 << 20) - 1, 11 << 20, len(right) - (700 << 10)]
    server = stack.serve("here", bad=bad, metadata=stack.metadata())
    before = set(os.listdir("/sys/class/bdi"))
    _, path = stack.mount_data(server)
    made = [name for name in set(os.listdir("/sys/class/bdi")) - before if name.startswith("erofs-")]
    assert made  # nothing says which mount has which; another test's may be among them
    for name in made:
        Path(f"/sys/class/bdi/{name}/read_ahead_kb").write_text(str(read_ahead_kib))
    failed = set()
    fd = os.open(path, os.O_RDONLY)
    try:
        for step in (4 << 20, 300 << 10, 4096):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            offset = 0
            while offset < len(right):
                try:
                    got = os.pread(fd, step, offset)
                except OSError as caught:
                    assert caught.errno == errno.EIO
                    failed.add(offset)
                    got = bytes(4096)  # go on behind it
                else:
                    assert got and got == right[offset : offset + len(got)]
                offset += len(got)
    finally:
        os.close(fd)
    assert failed >= {each - each % 4096 for each in bad}
    assert all(any(abs(each - known) < 2 << 20 for known in bad) for each in failed)


def test_an_error_that_passes_is_not_kept(stack: Stack) -> None:
    server, path = over(stack, *["here"] * 30, "none")
    ends = [stack.read(path, "buffered", seed=seed, most=40).end() for seed in range(6)]
    assert "OK" in ends and set(ends) <= {"OK", "EIO"}
    assert server.end()["errors"] > 0


def test_a_server_killed_under_load(stack: Stack) -> None:
    pick = random.Random(11)
    for _ in range(5):
        server, path = over(stack, "here", "late")
        readers = [stack.read(path, how, seed=pick.randrange(99), most=1_000_000) for how in HOW]
        wait_until_far(readers, pick.randrange(2, 10))
        server.kill()
        assert {reader.end(10) for reader in readers} <= GONE
        merged = os.path.dirname(path)
        Path(merged, "still written").write_bytes(b"x")
        [above] = kernel.mounts_below(merged)
        assert kernel.unmount(above.target)
        for each in kernel.mounts_below(str(stack.top)):
            # Not always at once: a namespace that somebody made meanwhile has copies.
            assert kernel.unmount_lazily(each.target)


def test_a_server_that_is_stopped_or_never_answers(stack: Stack) -> None:
    for behaviour in ("here", "never"):
        server, path = over(stack, behaviour)
        readers = [stack.read(path, how, most=1_000_000) for how in HOW]
        doomed = stack.read(path, "buffered", seed=2, most=1_000_000)
        wait_until(lambda started=(*readers, doomed): all(each.lines for each in started), what="they read")
        server.program.signal(signal.SIGSTOP)
        for each in (*readers, doomed):
            wait_until_blocked(each)
        doomed.program.signal(signal.SIGKILL)
        assert doomed.end(5) == "SIGKILL", "who waits can be killed"
        assert kernel.clear(server.folder) == 1
        assert {reader.end(10) for reader in readers} <= GONE
        assert kernel.clear(str(stack.top)) == 2
        server.program.signal(signal.SIGCONT)
        server.end()


def test_stop_with_layers_above(stack: Stack) -> None:
    server, path = over(stack, "here", "late")
    readers = [stack.read(path, how, most=1_000_000) for how in HOW]
    wait_until_far(readers, 2)
    server.end()
    assert {reader.end(10) for reader in readers} <= GONE
    assert kernel.clear(str(stack.top)) == 2


# ---- inner parts ---------------------------------------------------------------------------------------------


def differences(found: dict[bytes, Seen], wanted: dict[bytes, Seen]) -> list[object]:
    """What is wrong, a few of it."""
    wrong: list[object] = []
    for path in sorted(found.keys() | wanted.keys()):
        one, other = found.get(path), wanted.get(path)
        if one is None or other is None:
            wrong.append((path, "is missing" if one is None else "is too much"))
            continue
        wrong += [
            (path, name, mine, theirs)
            for name, mine, theirs in zip(Seen._fields, one, other, strict=True)
            if mine != theirs
        ]
    return wrong[:10]


def _directories(top: Path, *names: str) -> list[str]:
    for name in names:
        (top / name).mkdir(parents=True)
    return [str(top / name) for name in names]


def _device(path: bytes) -> Entry:
    return file(path)._replace(mode=stat.S_IFCHR | 0o666, rdev=(1, 3))
