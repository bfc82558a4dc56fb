"""An ordinary user unpacks a tree that root has published: hot files are there first, and programs run by then."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bootseer.blocks.trace import ANY_WORKLOAD, Trace
from bootseer.blocks.trace import encode as encode_trace
from bootseer.image.commands.traces import hot_files
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, Index, decode
from bootseer.tree.unpack.plan import files_of, plan
from bootseer.trust import KeyDirectory, seal
from tests.integration.image_roots import make_root
from tests.integration.test_image_commands import Commands
from tests.support import Program, Programs, Run, lacking, needs_program, wait_until
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.testing.trees import snapshot

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="another user is made by root"),
    needs_program("setpriv"),
]
USER = 65534
TOP = Path(__file__).parents[2]
NAME = "tests/root"
CODE = "import json, decimal; print(json.dumps(str(decimal.Decimal(7))))"
NEEDED = (
    "/json/",
    "/decimal.py",
    "/encodings/",
    "/bin/python",
    "/collections/",
    "/re/",
    "_decimal",
    "_json",
    "libpython",
    "/lib64/",
)
_STANDARD = re.compile(rb"lib/python3[.0-9]*/[^/]*$")  # modules that are one file


class User:
    """An ordinary user with a home; root's programs are shown to him also where they lie in a closed folder."""

    def __init__(self, top: Path) -> None:
        self.home = top / "home"
        self.home.mkdir(mode=0o700)
        os.chown(self.home, USER, USER)
        self._programs = Programs(os.fspath(top))
        self._binds: list[str] = []
        paths = sorted({os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, TOP)})
        closed = sorted(
            {str(each) for path in paths for each in Path(path).parents if not each.stat().st_mode & 1}
        )
        for directory in closed[:1]:
            inside = [path for path in paths if path.startswith(f"{directory}/")]
            for number, path in enumerate(inside):
                (top / f"inside{number}").mkdir()
                self._binds.append(f"mount --bind {path} {top}/inside{number}")
            self._binds.append(f"mount -t tmpfs -o mode=755 tmpfs {directory}")
            for number, path in enumerate(inside):
                self._binds += [f"mkdir -p {path}", f"mount --bind {top}/inside{number} {path}"]

    def start(self, *argv: str, **more: str) -> Program:
        """Any program."""
        user = [
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
        inner = shlex.join([*user, "--no-new-privs", *argv])
        script = " && ".join([*self._binds, f"cd {self.home}", f"exec {inner}"])
        env = {"HOME": os.fspath(self.home), "TMPDIR": os.fspath(self.home), "PYTHONPATH": os.fspath(TOP), **more}
        return self._programs.start("unshare", "-m", "sh", "-c", script, env=env)

    def as_root(self, *argv: str, **more: str) -> Program:
        """Any program, for root, where the user finds root's programs as well."""
        script = " && ".join([*self._binds, f"exec {shlex.join(argv)}"])
        return self._programs.start("unshare", "-m", "sh", "-c", script, env=more)

    def bootseer(self, *words: str) -> Program:
        code = "import sys; from launcher.commands import main; sys.exit(main(sys.argv[1:]))"
        return self.start(sys.executable, "-B", "-c", code, *words)

    def close(self) -> None:
        self._programs.close()


class Published:
    """A root file system that root has built, with a hot trace for anything, at a web server."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        make_root(os.fspath(self.root))
        (self.root / "opt/data/cold").write_bytes(random.Random(1).randbytes(40 << 20))
        image = Commands(top)
        image.make_key()
        self.key = (top / "keys" / "own.pub").read_text()
        image("build", self.root, "first", "--name", NAME)
        self._add_trace(image, top / "first")
        image("build", self.root, "tree", "--name", NAME, "--hot", "first", "--hot-name", NAME)
        image.close()
        self.files = {
            os.path.relpath(path, top / "tree"): path.read_bytes()
            for path in (top / "tree").rglob("*")
            if path.is_file()
        }
        self.index = _read_index(top / "tree")

    def _add_trace(self, image: Commands, tree: Path) -> None:
        index = _read_index(tree)
        blocks = _choose(index)
        digest = next((tree / "index").iterdir()).name
        trace = Trace(
            tree=digest, workload=ANY_WORKLOAD, runs=1, blocks=blocks, seen=[1] * len(blocks),
            first_ms=list(range(len(blocks))),
        )  # fmt: skip
        key = KeyDirectory(image.environ["BOOTSEER_KEYS"]).read_private()
        directory = tree / "traces" / digest
        directory.mkdir(parents=True)
        data = seal(encode_trace(trace), "application/vnd.bootseer.trace.v1+json", key)
        (directory / f"{ANY_WORKLOAD}.json").write_bytes(data)


def _read_index(tree: Path) -> Index:
    path = next((tree / "index").iterdir())
    return decode(path.read_bytes(), path.name, "the index")


def _choose(index: Index) -> list[int]:
    """All blocks of what the program needs."""
    wanted = [
        entry
        for entry in files_of(index)
        if any(each in f"/{os.fsdecode(index.path(entry))}" for each in NEEDED)
        or _STANDARD.search(index.path(entry))
    ]
    todo = plan(index, wanted)
    return list(todo.writes)


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="bootseer-user-"))  # pytest's own folders are closed to others
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def published(top: Path) -> Published:
    return Published(top)


@pytest.fixture
def user(top: Path) -> Iterator[User]:
    directory = Path(tempfile.mkdtemp(dir=top))
    directory.chmod(0o755)
    made = User(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


def trust(user: User, published: Published) -> None:
    path = user.home / "key.pub"
    path.write_text(published.key)
    done = user.bootseer("keys", "trust", os.fspath(path)).wait()
    assert done.status == 0, done.stderr


def silence_cold_packs(user: User, published: Published, server: FaultyHttpServer) -> list[HttpFault]:
    """No answer for packs that have nothing of hot files."""
    index = published.index
    entries = {index.path(entry): entry for entry in files_of(index)}
    shown = user.bootseer("image", "hot", "show", server.url, "--name", NAME, "--files", "--json").wait()
    assert shown.status == 0, shown.stderr
    hot = [entries[os.fsencode(each["path"])] for each in json.loads(shown.stdout)["files"]]
    packs = {index.block(number).pack for number in plan(index, hot).writes}
    cold = [pack for pack in range(len(index.packs)) if pack not in packs]
    assert cold, "hot files lie together"
    return [HttpFault(HttpKind.SILENCE, index.pack_path(pack)) for pack in cold]


def run_inside(user: User) -> Run:
    """The unpacked interpreter, with the unpacked libraries."""
    out = user.home / "out"
    python = next((out / "usr/local/bin").glob("python3.*"))
    environ: Mapping[str, str] = {
        "PYTHONHOME": f"{out}/usr/local",
        "PYTHONPATH": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": ":".join(os.fspath(path.parent) for path in out.rglob("libpython3*")),
    }
    return user.start(os.fspath(python), "-s", "-c", CODE, **environ).wait()


def test_hot_files_are_there_first(user: User, published: Published) -> None:
    """The store gives no cold pack until the program has run: it can need hot files alone."""
    with FaultyHttpServer(published.files) as server:
        trust(user, published)
        server.plan = silence_cold_packs(user, published, server)
        unpacking = user.bootseer(
            "image", "materialise", server.url, "out", "--name", NAME, "--ready", "ready", "--json"
        )
        wait_until(
            lambda: (user.home / "ready").exists() or unpacking.process.poll() is not None, 60, "the hot files"
        )
        assert unpacking.process.poll() is None, unpacking.stderr
        told = run_inside(user)
        assert (told.status, told.stdout) == (0, '"7"\n'), told.stderr
        assert unpacking.process.poll() is None, "it is not complete"
        server.plan = []
        server.drop_connections()
        done = unpacking.wait(60)
    assert done.status == 0, done.stderr
    record = json.loads(done.stdout)
    assert 0 < record["hot_files"] < record["files"] and record["hot_s"] < record["seconds"]
    print(f"| hot files {record['hot_s']:.2f} s | all {record['seconds']:.2f} s |")
    assert snapshot(os.fspath(user.home / "out")) == {
        path: each._replace(uid=USER, gid=USER, mode=each.mode & ~0o6000)
        for path, each in snapshot(os.fspath(published.root)).items()
    }
    assert stat.S_IMODE((user.home / "out").stat().st_mode) == stat.S_IMODE(published.root.stat().st_mode)


def test_who_trusts_nobody_gets_nothing(user: User, published: Published) -> None:
    with FaultyHttpServer(published.files) as server:
        done = user.bootseer("image", "materialise", server.url, "out", "--name", NAME).wait()
    assert done.status == 1 and "is signed by no trusted key" in done.stderr
    assert not (user.home / "out").exists()


def test_a_run_that_was_killed_goes_on(user: User, published: Published) -> None:
    trust(user, published)
    with FaultyHttpServer(published.files) as server:
        server.plan = silence_cold_packs(user, published, server)
        words = ("image", "materialise", server.url, "out", "--name", NAME, "--ready", "ready", "--json")
        unpacking = user.bootseer(*words)
        wait_until((user.home / "ready").exists, 60, "the hot files")
        unpacking.process.kill()
        unpacking.process.wait()
        server.plan = []
        again = user.bootseer(*words).wait()
        assert again.status == 1 and "is not empty" in again.stderr
        done = user.bootseer(*words, "--resume").wait(60)
        assert done.status == 0, done.stderr
        assert json.loads(done.stdout)["kept_files"] > 0
    assert run_inside(user).stdout == '"7"\n'


def test_a_mount_says_what_to_do_instead(user: User, published: Published) -> None:
    trust(user, published)
    (user.home / "mnt").mkdir()
    with FaultyHttpServer(published.files) as server:
        done = user.bootseer("image", "mount", server.url, "mnt", "--name", NAME).wait()
        assert done.status == 1
        assert "trees cannot be mounted here" in done.stderr and "`bootseer image materialise`" in done.stderr
        assert done.stderr.count("\n") == 1
        record = user.bootseer("image", "record", server.url, "--name", NAME, "--", "python3").wait()
        assert record.status == 1 and "which is impossible" in record.stderr
        fetched = user.bootseer("image", "prefetch", server.url, "--name", NAME, "--all", "--json").wait(60)
        assert fetched.status == 0, fetched.stderr
        assert json.loads(fetched.stdout)["blocks"] == published.index.block_count


def test_hot_files_come_in_the_order_of_their_blocks(published: Published) -> None:
    index = published.index
    files = {
        os.fsdecode(index.path(entry)): index.runs[entry][0] // BLOCK_UNITS
        for entry in files_of(index)
        if index.sizes[entry] >= BLOCK_BYTES and index.runs[entry][0] != HOLE
    }
    one, other = list(files)[:2]
    for paths in ([one, other], [other, one]):
        assert [each.path for each in hot_files(index, [files[path] for path in paths])] == paths


def test_what_a_user_writes_in_an_image_is_kept(user: User, published: Published) -> None:
    """In a user namespace, where root is nobody."""
    os.chown(published.root / "var", USER, USER)
    words = ("image", "run", f"rootfs:{published.root}", "--writable", "kept", "--", "sh", "-c")
    for text in ("one", "two"):
        run = user.bootseer(*words, f"echo {text} >> /var/new; cat /var/new").wait()
        if "no namespaces for an image here" in run.stderr or "cannot hold writes" in run.stderr:
            lacking("users have no overlays here")
        assert run.status == 0, run.stderr
    assert (user.home / "kept/upper/var/new").read_text() == "one\ntwo\n"
