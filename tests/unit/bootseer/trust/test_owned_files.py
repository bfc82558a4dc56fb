"""Files that nobody else could have put there: every step of the way, links, modes, owners."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.trust import owned_files
from bootseer.trust.owned_files import (
    NotOwnedError,
    check_owned_directory,
    foreign_fuse_users,
    own_uids,
    read_owned,
)

OTHER = 65534


def needs_root(test: Callable[..., None]) -> Callable[..., None]:
    skips = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users can be made by root only")
    return pytest.mark.system(skips(test))


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """tmp/home/tree/file, all this user's."""
    file = tmp_path / "home" / "tree" / "file"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"abc")
    return tmp_path / "home"


def refused(path: Path, text: str, **options: object) -> str:
    with pytest.raises(NotOwnedError, match=text) as caught:
        read_owned(str(path), max_bytes=99, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_own_files_are_read(home: Path) -> None:
    data, status = read_owned(str(home / "tree" / "file"), max_bytes=3)
    assert (data, status.st_size) == (b"abc", 3)
    check_owned_directory(str(home / "tree"))
    (home / "empty").touch()
    assert read_owned(str(home / "empty"), max_bytes=0)[0] == b""


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022, 0o1020])
def test_what_others_may_write_does_not_count(home: Path, mode: int) -> None:
    file, directory = home / "tree" / "file", home / "tree"
    for place in (file, directory, home):
        before = stat.S_IMODE(place.stat().st_mode)
        place.chmod(before | mode)
        if place == home and mode & stat.S_ISVTX:
            read_owned(str(file), max_bytes=99)
        else:
            assert refused(file, "can be written to by others").startswith(f"{place} can be")
        if place != file and not mode & stat.S_ISVTX:
            with pytest.raises(NotOwnedError, match="written to by others"):
                check_owned_directory(str(directory))
        place.chmod(before)
    read_owned(str(file), max_bytes=99)


def test_sticky_directories_count_only_above(home: Path) -> None:
    home.chmod(0o1777)
    read_owned(str(home / "tree" / "file"), max_bytes=99)
    (home / "loose").write_bytes(b"abc")
    refused(home / "loose", f"^{home} can be written to by others .mode 1777.: chmod go-w {home}$")
    with pytest.raises(NotOwnedError, match="mode 1777"):
        check_owned_directory(str(home))
    check_owned_directory(str(home / "tree"))


@needs_root
def test_what_belongs_to_others_does_not_count(home: Path) -> None:
    file = home / "tree" / "file"
    for place in (file, file.parent, home):
        os.chown(place, OTHER, -1)
        assert refused(file, r"belongs to user \S+, not to root$").startswith(f"{place} belongs")
        os.chown(place, 0, -1)
    os.chown(file, OTHER, OTHER)
    assert read_owned(str(file), max_bytes=9, uids=frozenset((0, OTHER)))[0] == b"abc"
    home.chmod(0o1777)
    os.chown(home, OTHER, -1)  # whose sticky folder it is may exchange all in it
    refused(file, "belongs to user")


@needs_root
def test_an_ordinary_user_and_root_count(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        Path(name).chmod(0o755)
        mine, roots, eves = Path(name) / "mine", Path(name) / "roots", Path(name) / "eves"
        for path, uid in ((mine, OTHER), (roots, 0), (eves, 12345)):
            path.write_bytes(b"abc")
            os.chown(path, uid, uid)
        os.seteuid(OTHER)
        try:
            assert own_uids() == {0, OTHER}
            assert read_owned(str(mine), max_bytes=9)[0] == read_owned(str(roots), max_bytes=9)[0] == b"abc"
            refused(eves, r"belongs to user 12345, not to user \S+ or root|not to nobody")
            refused(Path("/root/.profile"), "cannot be inspected: Permission denied|cannot be read")
            os.seteuid(0)
            roots.chmod(0o640)
            os.setegid(OTHER)
            os.chown(roots, 0, OTHER)
            os.seteuid(OTHER)
            assert read_owned(str(roots), max_bytes=9, is_secret=True)[0] == b"abc", "root shares it with a group"
            refused(mine, "can be read by others .mode 0644.: chmod 600", is_secret=True)
        finally:
            os.seteuid(0)
            os.setegid(0)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o601, 0o610])
def test_secrets_are_for_the_owner_alone(home: Path, mode: int) -> None:
    file = home / "tree" / "file"
    file.chmod(mode)
    refused(file, f"can be read by others .mode {mode:04o}.: chmod 600 {file}", is_secret=True)
    for private in (0o600, 0o400):
        file.chmod(private)
        assert read_owned(str(file), max_bytes=9, is_secret=True)[0] == b"abc"


def test_own_links_are_followed(home: Path) -> None:
    (home / "relative").symlink_to("tree/../tree/./file")
    (home / "absolute").symlink_to(home / "tree")
    (home / "up").symlink_to("../../../../../../../../../../../../.." + str(home))
    (home / "chain").symlink_to("absolute/file")
    for path in ("relative", "absolute/file", "up/chain", "chain", "up/up/up/relative"):
        assert read_owned(str(home / path), max_bytes=9)[0] == b"abc", path
    check_owned_directory(str(home / "absolute"))
    (home / "loop").symlink_to("loop")
    refused(home / "loop", "too many links")


@needs_root
def test_links_of_others_are_not_followed(home: Path) -> None:
    """In a folder for all, where anybody may put a link to what belongs to us."""
    home.chmod(0o1777)
    link = home / "link"
    link.symlink_to("tree")
    read_owned(str(link / "file"), max_bytes=9)
    os.lchown(link, OTHER, OTHER)
    refused(link / "file", f"^{link} belongs to user")


def test_a_link_leads_only_to_checked_places(home: Path) -> None:
    open_folder = home.parent / "open"
    open_folder.mkdir(mode=0o777)
    open_folder.chmod(0o777)
    (open_folder / "file").write_bytes(b"abc")
    (home / "to").symlink_to(open_folder)
    refused(home / "to" / "file", f"^{open_folder} can be written to by others")


def test_what_is_no_file_does_not_count(home: Path) -> None:
    os.mkfifo(home / "fifo")
    refused(home / "fifo", "is not what it should be: a file")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "socket"))
        refused(home / "socket", "is not what it should be: a file")
    refused(home, "is a directory, not a file")
    refused(home / "tree" / "file" / "more", "is not what it should be: a directory")
    with pytest.raises(NotOwnedError, match="is not what it should be: a directory"):
        check_owned_directory(str(home / "tree" / "file"))
    refused(home / "tree" / "file" / ".." / "file", "is not what it should be: a directory")
    for missing in (home / "missing", home / "missing" / "file"):
        with pytest.raises(FileNotFoundError):
            read_owned(str(missing), max_bytes=9)
    with pytest.raises(ValueError, match="is not absolute"):
        read_owned("tree/file", max_bytes=9)


def test_sizes_are_bounded(home: Path) -> None:
    with pytest.raises(NotOwnedError, match="has 3 bytes; at most 2"):
        read_owned(str(home / "tree" / "file"), max_bytes=2)
    with pytest.raises(NotOwnedError, match="has more than 9 bytes"):
        read_owned("/proc/self/mountinfo", max_bytes=9)  # of files that say they are empty


@needs_root
def test_a_directory_that_is_exchanged_on_the_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each step somebody exchanges what a name stands for: refused, or the file that was checked."""
    file = home / "tree" / "file"
    evil = home.parent / "evil"
    (evil / "tree").mkdir(parents=True)
    (evil / "tree" / "file").write_bytes(b"evil")
    for path in (evil, evil / "tree", evil / "tree" / "file"):
        os.chown(path, OTHER, OTHER)
    real_open = os.open

    def read(at: int = 0, exchange: Callable[[Path, Path], Callable[[], None]] | None = None) -> int:
        """Exchanges before the step `at`; gives how many steps there were."""
        steps = 0
        undo: Callable[[], None] | None = None

        def meddle(*args: object, **more: object) -> int:
            nonlocal steps, undo
            steps += 1
            if steps == at and exchange is not None:
                undo = exchange(home, evil)
            return real_open(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(owned_files.os, "open", meddle)
        try:
            outcomes.add(read_owned(str(file), max_bytes=9)[0])
        except NotOwnedError:
            outcomes.add(b"refused")
        if undo is not None:
            undo()
        return steps

    outcomes: set[bytes] = set()
    for at in range(1, read() + 1):
        read(at, _exchange)
        read(at, _link)
    assert outcomes == {b"abc", b"refused"}


def _exchange(home: Path, evil: Path) -> Callable[[], None]:
    aside = home.parent / "aside"

    def undo() -> None:
        home.rename(evil)
        aside.rename(home)

    home.rename(aside)
    evil.rename(home)
    return undo


def _link(home: Path, evil: Path) -> Callable[[], None]:
    aside = home.parent / "aside"

    def undo() -> None:
        home.unlink()
        aside.rename(home)

    home.rename(aside)
    home.symlink_to(evil)
    os.lchown(home, OTHER, OTHER)
    return undo


# ---- FUSE --------------------------------------------------------------------------------------------------

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:50 / /a rw - fuse.sshfs host: rw,user_id=1000,group_id=1000
31 22 0:51 / /b rw shared:7 master:1 - fuse x rw,user_id=0,group_id=0,allow_other
32 22 0:52 / /c rw - fuseblk /dev/sdb rw,user_id=0,group_id=0
33 22 0:53 / /d rw - fuse.odd x rw,user_id=what
34 22 0:54 / /e rw - nfs host:/user_id=7 rw,user_id=7
broken
"""


@pytest.mark.parametrize(
    ("device", "uids", "users"),
    [
        ((254, 1), {0}, []), ((0, 50), {0}, ["1000"]), ((0, 50), {0, 1000}, []), ((0, 51), {0}, []),
        ((0, 52), {5}, ["0"]), ((0, 53), {0}, ["what"]), ((0, 54), {0}, []), ((9, 9), {0}, []),
    ],
)  # fmt: skip
def test_who_mounted_a_fuse_file_system(device: tuple[int, int], uids: set[int], users: list[str]) -> None:
    assert foreign_fuse_users(MOUNTS, os.makedev(*device), uids) == users


@pytest.mark.system
@pytest.mark.leaks
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse")
def test_what_the_kernel_says_of_a_fuse_file_system(tmp_path: Path) -> None:
    """Of a real one that says it is of another user; nobody serves it, so nothing of it is touched."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    directory = str(tmp_path).encode()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id={OTHER},group_id=0,allow_other".encode()
        if libc.mount(b"test", directory, b"fuse", 6, options) != 0:
            pytest.skip(f"FUSE cannot be mounted here: {os.strerror(ctypes.get_errno())}")
        try:
            text = Path("/proc/self/mountinfo").read_text()
            (line,) = [each for each in text.splitlines() if each.split()[4] == str(tmp_path)]
            major, minor = map(int, line.split()[2].split(":"))
            assert foreign_fuse_users(text, os.makedev(major, minor), {0}) == [str(OTHER)]
            assert foreign_fuse_users(text, os.makedev(major, minor), {0, OTHER}) == []
        finally:
            assert libc.umount2(directory, 2) == 0
    finally:
        os.close(fd)
