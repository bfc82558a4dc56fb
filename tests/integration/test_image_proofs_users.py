"""Images for people who may not mount and for those who believe nobody: unpacked, hot files first; or refused.

The image has a Python and this environment's torch; its link is slow, and shared by all requests, as a node's is.
With BOOTSEER_CAMPAIGN=full it is slow to the end, and times are compared too; else only where it has to be.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import shutil
import ssl
import stat
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests import support_trees
from tests.campaign import IS_FULL
from tests.contract import servers
from tests.integration.image_roots import Interpreter, libraries, link, make_root, tell
from tests.integration.mounted_trees import make_files, need_mounts
from tests.integration.test_image_commands import Commands
from tests.integration.test_materialise_user import USER, User
from tests.support import lacking, needs_program, wait_until
from tests.support_trees import differences, walk
from tests.testing.faulty_http import FaultyHttpServer
from tests.testing.registry import make_certificates

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="another user is made by root"),
    needs_program("setpriv"),
]
BYTES_PER_S = 12e6 if IS_FULL else 40e6
TRICKLE_BYTES_PER_S, OPEN_BYTES_PER_S = 2e6, 1e9


# ---- an ordinary user: hot files first -------------------------------------------------------------------------


class SlowLink(FaultyHttpServer):
    """All answers share one link; `bytes_per_s` can be changed at any time."""

    def __init__(self, files: Mapping[str, bytes | memoryview], bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._turn = threading.Lock()
        super().__init__(files)

    def add_served(self, name: str, count: int) -> None:
        with self._turn:
            self._free_s = max(self._free_s, time.monotonic()) + count / self.bytes_per_s
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            self.closing.wait(wait_s)
        super().add_served(name, count)


class TorchImage:
    """A root with the host's Python and torch, built and signed by root, with a recorded and published start."""

    venv = "/opt/venv/site-packages"

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = top / "root"
        self.image = Commands(top)

    def build(self) -> None:
        found = tell(sys.executable)
        assert found is not None
        self.python = f"usr/local/bin/python{found.version[0]}.{found.version[1]}"
        make_root(os.fspath(self.root), Interpreter(*found))
        place = self.root / self.venv[1:]
        place.parent.mkdir()
        import torch

        packages = os.path.dirname(os.path.dirname(torch.__file__))
        support_trees.copy_still(packages, os.fspath(place))
        places = [f"{packages}/{name}/**/*.so" for name in ("torch", "numpy")]
        needing = [path for each in places for path in glob.glob(each, recursive=True)]
        for path in libraries(needing):
            if not path.startswith(packages) and not os.path.lexists(f"{self.root}{path}"):
                os.makedirs(os.path.dirname(f"{self.root}{path}"), exist_ok=True)
                link(os.path.realpath(path), f"{self.root}{path}")
        self.image.make_key()
        self.key = (self.top / "keys" / "own.pub").read_text()
        self.image("build", self.root, "tree", "--name", "tests/torch")
        recorded = self.image(
            "record", "tree", "--name", "tests/torch", "--publish", "--json", "--env", f"PYTHONPATH={self.venv}",
            "--", f"/{self.python}", "-s", "-c", "import torch; print(torch.ones(3).sum().item())",
        )  # fmt: skip
        assert recorded.stdout.splitlines()[0] == "3.0"
        self.trace = json.loads(recorded.stdout.splitlines()[-1])

    def files(self) -> dict[str, bytes]:
        """As a server has them: half a gigabyte."""
        tree = self.top / "tree"
        return {os.path.relpath(path, tree): path.read_bytes() for path in tree.rglob("*") if path.is_file()}

    def import_torch(self, user: User) -> tuple[int, str, str]:
        """By the unpacked interpreter with the unpacked torch; status, stdout and stderr."""
        out = user.home / "out"
        environ = {
            "PYTHONHOME": f"{out}/usr/local",
            "PYTHONPATH": f"{out}{self.venv}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": ":".join(sorted({os.fspath(path.parent) for path in out.rglob("libpython3*")})),
        }
        code = "import torch; print(torch.__file__, torch.ones(3).sum().item())"
        done = user.start(os.fspath(out / self.python), "-s", "-c", code, **environ).wait(120)
        return done.status, done.stdout, done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="bootseer-proofs-"))  # pytest's own folders are closed to others
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torch_can_be_imported_long_before_all_is_there(open_folder: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        lacking("torch is not installed")
    need_mounts()  # to record
    made = TorchImage(open_folder)
    (open_folder / "user").mkdir(mode=0o755)
    user = User(open_folder / "user")
    try:
        made.build()
        with SlowLink(made.files(), BYTES_PER_S) as server:
            (user.home / "key.pub").write_text(made.key)
            trusting = user.bootseer("keys", "trust", os.fspath(user.home / "key.pub")).wait()
            assert trusting.status == 0, trusting.stderr
            began_s = time.monotonic()
            unpacking = user.bootseer(
                "image",
                "materialise",
                server.url,
                "out",
                "--name",
                "tests/torch",
                "--workload",
                made.trace["workload"],
                "--ready",
                "ready",
                "--json",
            )
            ready = user.home / "ready"
            wait_until(lambda: ready.exists() or unpacking.process.poll() is not None, 300, "the hot files")
            assert unpacking.process.poll() is None, unpacking.stderr
            hot_s = time.monotonic() - began_s
            if not IS_FULL:
                server.bytes_per_s = TRICKLE_BYTES_PER_S  # until torch is imported, however long that takes
            hot_bytes = sum(server.served_bytes.values())
            status, said, why = made.import_torch(user)
            imported_s = time.monotonic() - began_s
            assert status == 0, why
            assert said.split() == [f"{user.home}/out{made.venv}/torch/__init__.py", "3.0"]
            said_so_far = (
                f"{hot_bytes} of {sum(server.served_bytes.values())} bytes, {hot_s:.1f} s of {imported_s:.1f} s"
            )
            assert unpacking.process.poll() is None, f"it is complete: {said_so_far}"
            imported_bytes = sum(server.served_bytes.values())
            if not IS_FULL:
                server.bytes_per_s = OPEN_BYTES_PER_S
            done = unpacking.wait(600)
            complete_s = time.monotonic() - began_s
            all_bytes = sum(server.served_bytes.values())
        assert done.status == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout)
        if IS_FULL:
            print(
                f"| link of {BYTES_PER_S / 1e6:.0f} MB/s | hot files {record['hot_files']} of {record['files']},"
                f" {hot_bytes / 1e6:.0f} of {all_bytes / 1e6:.0f} MB | there after {hot_s:.1f} s | torch imported"
                f" after {imported_s:.1f} s | complete after {complete_s:.1f} s |"
            )
        assert 0 < record["hot_files"] < record["files"] / 2
        # With CUDA's libraries, which an import loads, the hot files are two thirds of all.
        most = 0.8 if importlib.util.find_spec("nvidia") else 0.5
        assert hot_bytes < most * all_bytes
        assert imported_bytes < 0.5 * all_bytes * (1 + most)
        assert not IS_FULL or imported_s < 0.5 * complete_s * (1 + most)
        expected = walk(made.root)
        for fact in expected.facts.values():
            assert isinstance(fact, dict)
            fact.update(uid=USER, gid=USER, mode=oct(int(str(fact["mode"]), 8) & ~(stat.S_ISUID | stat.S_ISGID)))
        assert differences(expected, walk(user.home / "out")) == []
    finally:
        user.close()
        made.image.close()


# ---- stores that nobody owns ---------------------------------------------------------------------------------


class Place(Protocol):
    """A store, as its publisher and its readers see it, and a back door."""

    environ: Mapping[str, str]

    def publish(self, image: Commands, source: Path, tree: str) -> str: ...
    def url(self, tree: str) -> str: ...
    def copy(self, source: str, target: str) -> None: ...


class Web:
    """A web server over a folder."""

    environ: Mapping[str, str] = {}

    def __init__(self, folder: Path, url: str) -> None:
        self._directory, self._url = folder, url

    def publish(self, image: Commands, source: Path, tree: str) -> str:
        return str(image.ask("build", source, self._directory / tree, "--name", self.url(tree))["digest"])

    def url(self, tree: str) -> str:
        return f"{self._url}/{tree}"

    def copy(self, source: str, target: str) -> None:
        servers.write_file(self._directory, target, (self._directory / source).read_bytes())


class Bucket:
    """moto's S3, by TLS."""

    def __init__(self, endpoint: str, ca: str, name: str) -> None:
        self._endpoint, self._name = endpoint, name
        self._context = ssl.create_default_context(cafile=ca)
        self.environ: Mapping[str, str] = {
            "AWS_ENDPOINT": endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x", "SSL_CERT_FILE": ca,
        }  # fmt: skip
        self._call("PUT", "")

    def publish(self, image: Commands, source: Path, tree: str) -> str:
        return str(image.ask("build", source, self.url(tree))["digest"])

    def url(self, tree: str) -> str:
        return f"s3://{self._name}/{tree}"

    def copy(self, source: str, target: str) -> None:
        self._call("PUT", f"/{target}", self._call("GET", f"/{source}"))

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {"Authorization": "AWS x:x", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self._endpoint}/{self._name}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
            body: bytes = answer.read()
            return body


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL, and the file of the authority."""
    certificates = make_certificates(os.fspath(tmp_path_factory.mktemp("certificates")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3(certificates.server_context()) as url:
            yield url, certificates.ca


@pytest.fixture(params=["http", "s3"])
def place(request: pytest.FixtureRequest, endpoint: tuple[str, str], tmp_path: Path) -> Iterator[Place]:
    if request.param == "s3":
        yield Bucket(*endpoint, f"bucket-{os.urandom(6).hex()}")
        return
    (tmp_path / "web").mkdir()
    with servers.serve_directory(tmp_path / "web") as url:
        yield Web(tmp_path / "web", url)


class People:
    """Each with keys, a cache and a runtime folder of his own."""

    def __init__(self, top: Path, environ: Mapping[str, str]) -> None:
        self._top, self._environ = top, environ
        self._made: list[Commands] = []

    def __call__(self, name: str) -> Commands:
        (self._top / name).mkdir()
        made = Commands(self._top / name)
        made.environ.update(self._environ)
        self._made.append(made)
        return made

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def people(tmp_path: Path, place: Place) -> Iterator[People]:
    made = People(tmp_path, place.environ)
    yield made
    made.close()


def check_refused(reader: Commands, url: str, *texts: str) -> None:
    """However it would be used; and nothing of it is there afterwards."""
    (reader.top / "mnt").mkdir(exist_ok=True)
    ways = (
        ("inspect", url), ("verify", url), ("prefetch", url, "--all"), ("materialise", url, "out"),
        ("mount", url, "mnt"), ("run", url, "--", "cat", "/words"), ("push", url, "oci://127.0.0.1:1/none:none"),
    )  # fmt: skip
    for words in ways:
        error = reader(*words, status=1).stderr
        line = next(line for line in error.splitlines() if line.startswith("bootseer: error: "))
        for text in texts:
            assert text in line, (words, line)
    assert not (reader.top / "out").exists() and os.listdir(reader.top / "mnt") == []
    cached = [path for path in (reader.top / "cache").rglob("*") if path.name in ("index", "data")]
    assert cached == []


@pytest.mark.timeout(300)
def test_trees_of_unknown_publishers_are_refused(place: Place, people: People, tmp_path: Path) -> None:
    need_mounts()
    source = make_files(tmp_path / "source", count=5)
    (source / "words").write_text("Ada's\n")
    ada, eve, reader = (people(name) for name in ("ada", "eve", "reader"))
    for each in (ada, eve):
        each.make_key()
    wanted = place.publish(ada, source, "wanted")
    url = place.url("wanted")

    check_refused(reader, url, f"{url}/tree.json: is signed by no trusted key", "`bootseer keys trust FILE.pub`")
    reader("trust", eve.top / "keys" / "own.pub", "--name", "eve", group="keys")
    check_refused(reader, url, f"{url}/tree.json: is signed by no trusted key")
    reader("trust", ada.top / "keys" / "own.pub", "--name", "ada", group="keys")
    assert reader.ask("inspect", url)["because"].startswith("signed by ada")

    # Another image of Ada's, as she signed it, in the place of the one that is wanted.
    (source / "words").write_text("Ada's other\n")
    other = place.publish(ada, source, "other")
    assert other != wanted
    for name in ("tree.json", f"index/{other}"):
        place.copy(f"other/{name}", f"wanted/{name}")
    check_refused(reader, url, f"is the tree '{place.url('other')}', not '{url}'")

    # Hers again, but the index that it names is the other's.
    place.publish(ada, make_files(tmp_path / "source2", seed=2, count=5), "wanted")
    now = reader.ask("inspect", url)["digest"]
    place.copy(f"other/index/{other}", f"wanted/index/{now}")
    check_refused(reader, url, now)

    assert reader.ask("materialise", place.url("other"), "theirs")["digest"] == other
    assert (reader.top / "theirs" / "words").read_text() == "Ada's other\n"
