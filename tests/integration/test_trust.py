"""Trees of real web servers, S3, HDFS and other users' folders: what is believed, and what is refused and why."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.contract import servers
from tests.integration import hdfs_cluster
from tests.support import clean_environ, needs_program
from tests.testing.minihdfs import MiniHdfs

DRIVER = os.path.join(os.path.dirname(__file__), "trust_driver.py")
TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KEYS = [sys.executable, "-c", "import sys; from bootseer.cli.keys import main; sys.exit(main(sys.argv[1:]))"]
NOBODY, SOMEBODY = 65534, 12345
ADMIN = pwd.getpwuid(os.geteuid()).pw_name  # of the test's own HDFS
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


class User:
    """Somebody with a folder of keys; `uid` and `environ`: who runs the programs."""

    def __init__(self, folder: Path, name: str, *, uid: int | None = None, **environ: str) -> None:
        self.name = name
        self.keys = folder / name
        caps = "-all,+dac_read_search"  # the interpreter may be root's
        user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        self._prefix = [] if uid is None else [*user, "--inh-caps", caps, "--ambient-caps", caps]
        self._environ = {
            **clean_environ(), "BOOTSEER_KEYS": str(self.keys), "PYTHONPATH": TOP, "PYTHONDONTWRITEBYTECODE": "1",
            **environ,
        }  # fmt: skip

    def key(self, *words: object, status: int = 0, text: str = "") -> subprocess.CompletedProcess[str]:
        """Runs `bootseer keys ...`."""
        done = subprocess.run(
            [*self._prefix, *KEYS, *map(str, words)], env=self._environ, input=text,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == status, (done.stdout, done.stderr)
        return done

    def make_key(self) -> str:
        """The public line."""
        return self.key("make", "--name", self.name).stdout.splitlines()[0]

    def trusts(self, line: str) -> None:
        self.key("trust", "-", text=line)

    def runs(self, *orders: dict[str, Any]) -> list[dict[str, str]]:
        done = subprocess.run(
            [*self._prefix, sys.executable, DRIVER], env=self._environ, capture_output=True, text=True, timeout=60,
            input=json.dumps([{"options": {}} | order for order in orders]),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def publishes(self, url: str, source: str, **more: Any) -> str:
        (found,) = self.runs({"do": "publish", "url": url, "source": source, **more})
        assert "digest" in found, found
        return found["digest"]

    def opens(self, url: str, **more: Any) -> dict[str, str]:
        return self.runs({"do": "open", "url": url, **more})[0]

    def gets(self, url: str, **more: Any) -> str:
        """The source of the tree that it could open."""
        found = self.opens(url, **more)
        assert "source" in found, found
        return found["source"]


def refused(found: dict[str, str], *texts: str, error: str = "Untrusted") -> None:
    assert found.get("error") == error, found
    assert "\n" not in found["text"]
    for text in texts:
        assert text in found["text"]


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Any]:
    before = os.umask(0o022)
    yield lambda name, **more: User(tmp_path / "users", name, **more)
    os.umask(before)


# ---- stores of which nobody can tell who wrote to them -----------------------------------------------------


class Place(Protocol):
    """A store, and a back door to its files."""

    def publish(self, user: User, tree: str, source: str, **more: Any) -> str: ...
    def order(self, tree: str) -> dict[str, Any]: ...
    def url(self, tree: str) -> str: ...
    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...


class Web:
    """A web server over a folder that was written to before."""

    def __init__(self, folder: Path, url: str) -> None:
        self._directory, self._url = folder, url

    def publish(self, user: User, tree: str, source: str, **more: Any) -> str:
        more.setdefault("name", self.url(tree))
        return user.publishes(str(self._directory / tree), source, **more)

    def order(self, tree: str) -> dict[str, Any]:
        return {"do": "open", "url": self.url(tree)}

    def url(self, tree: str) -> str:
        return f"{self._url}/{tree}"

    def read(self, path: str) -> bytes:
        return (self._directory / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        servers.write_file(self._directory, path, data)


class Bucket:
    """moto's S3."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint, self._name = endpoint, name
        self._call("PUT", "")
        config = {"access_key_id": "x", "secret_access_key": "x", "region": "us-east-1", "endpoint": endpoint}
        self._options = {"config": config, "client_options": {"allow_http": True}}

    def publish(self, user: User, tree: str, source: str, **more: Any) -> str:
        return user.publishes(self.url(tree), source, options=self._options, **more)

    def order(self, tree: str) -> dict[str, Any]:
        return {"do": "open", "url": self.url(tree), "options": self._options}

    def url(self, tree: str) -> str:
        return f"s3://{self._name}/{tree}"

    def read(self, path: str) -> bytes:
        return self._call("GET", f"/{path}")

    def write(self, path: str, data: bytes) -> None:
        self._call("PUT", f"/{path}", data)

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"{self._endpoint}/{self._name}{path}"
        headers = {"Authorization": "AWS x:x", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as url:
            yield url


@pytest.fixture(params=["http", "s3"])
def place(request: pytest.FixtureRequest, endpoint: str, tmp_path: Path) -> Iterator[Place]:
    if request.param == "s3":
        yield Bucket(endpoint, f"bucket-{os.urandom(6).hex()}")
        return
    directory = tmp_path / "web"
    directory.mkdir()
    with servers.serve_directory(directory) as url:
        yield Web(directory, url)


def test_who_is_trusted_on_the_network(place: Place, users: Any) -> None:
    ada, eve, reader, stranger = (users(name) for name in ("ada", "eve", "reader", "stranger"))
    reader.trusts(ada.make_key())
    eve.make_key()
    digest = place.publish(ada, "signed", "ada's")
    place.publish(eve, "eves", "eve's")
    place.publish(ada, "unsigned", "ada's", signs=False)

    names = ("signed", "eves", "unsigned")
    signed, eves, unsigned = reader.runs(*map(place.order, names))
    assert (signed["source"], signed["digest"]) == ("ada's", digest)
    assert signed["because"].startswith("signed by ada (")
    refused(
        eves, f"{place.url('eves')}/tree.json: is signed by no trusted key (", "`bootseer keys trust FILE.pub`"
    )
    refused(unsigned, "is not signed, and", "the writers of a store of this kind", "`bootseer keys make`")
    # Without any key, and with one that did not sign it.
    stranger_order = [place.order(name) for name in names]
    for _ in range(2):
        for found in stranger.runs(*stranger_order):
            refused(found, "`bootseer keys make`")
        if not stranger.keys.exists():
            stranger.make_key()
    (mine,) = ada.runs(place.order("signed"))
    assert mine["source"] == "ada's", "the own key is trusted"
    reader.key("forget", "ada")
    refused(reader.runs(place.order("signed"))[0], "is signed by no trusted key")


def test_a_signed_tree_in_the_place_of_another(place: Place, users: Any) -> None:
    """All is signed by Ada, and nothing of it is what was asked for."""
    ada = users("ada")
    ada.make_key()
    old = place.publish(ada, "wanted", "old")
    (old_head,) = [place.read("wanted/tree.json")]
    place.publish(ada, "other", "other")
    other_digest = ada.runs(place.order("other"))[0]["digest"]
    wanted_digest = place.publish(ada, "wanted", "wanted")
    wanted_head = place.read("wanted/tree.json")
    other_head, other_index = place.read("other/tree.json"), place.read(f"other/index/{other_digest}")

    place.write("wanted/tree.json", other_head)
    place.write(f"wanted/index/{other_digest}", other_index)
    refused(ada.runs(place.order("wanted"))[0], f"is the tree {place.url('other')!r}, not {place.url('wanted')!r}")
    # Under its own name it may lie anywhere.
    assert ada.runs(place.order("wanted") | {"name": place.url("other")})[0]["source"] == "other"

    place.write("wanted/tree.json", wanted_head)
    place.write(f"wanted/index/{wanted_digest}", other_index)  # an index that is signed, but by another head
    found = ada.runs(place.order("wanted"))[0]
    refused(found, f"{wanted_digest}: ", error="IntegrityError")

    # An older one of the same name was signed as well: a pin is what tells them apart.
    place.write("wanted/tree.json", old_head)
    order = place.order("wanted")
    assert ada.runs(order)[0]["source"] == "old"
    pinned = order | {"url": f"{order['url']}@sha256:{old}"}
    assert ada.runs(pinned)[0]["source"] == "old"
    other = order | {"url": f"{order['url']}@sha256:{wanted_digest}"}
    refused(ada.runs(other)[0], error="IntegrityError")


def test_what_was_tampered_with(place: Place, users: Any) -> None:
    ada = users("ada")
    ada.make_key()
    digest = place.publish(ada, "tree", "right")
    head, index = place.read("tree/tree.json"), place.read(f"tree/index/{digest}")
    order = place.order("tree")
    sealed = json.loads(head)
    letters = sealed["payload"]

    def with_(**fields: Any) -> bytes:
        return json.dumps(sealed | fields).encode()

    signature = sealed["signatures"][0]
    for changed, error, text in (
        (with_(payload=letters[:-8] + "AAAA" + letters[-4:]), "Untrusted", "was changed after ada"),
        (with_(signatures=[signature | {"sig": "AAAA" + signature["sig"][4:]}]), "Untrusted", "was changed after"),
        (with_(signatures=[]), "Untrusted", "is not signed"),
        (with_(signatures=[signature | {"keyid": "0" * 64}]), "Untrusted", "is signed by no trusted key"),
        (with_(payloadType="application/json"), "IntegrityError", "holds 'application/json' instead"),
        (head[:-1], "IntegrityError", "is not a DSSE envelope"),
        (b"", "IntegrityError", "is not a DSSE envelope"),
        (b" " * 70_000 + head, "IntegrityError", "at most 65536"),
    ):
        place.write("tree/tree.json", changed)
        refused(ada.runs(order)[0], text, error=error)
    place.write("tree/tree.json", head)
    flipped = bytearray(index)
    flipped[len(index) // 2] ^= 1
    for changed in (bytes(flipped), index[:-1], b"", index + b"x"):
        place.write(f"tree/index/{digest}", changed)
        plain, pinned = ada.runs(order, order | {"digest": digest})
        if changed.startswith(index):  # what lies behind it is not read
            assert plain["source"] == "right"
        else:
            refused(plain, digest, error="IntegrityError")
        refused(pinned, digest, error="IntegrityError")
    place.write(f"tree/index/{digest}", index)
    assert ada.runs(order)[0]["source"] == "right"


def test_a_pinned_tree_needs_no_key(place: Place, users: Any) -> None:
    ada, stranger = users("ada"), users("stranger")
    digest = place.publish(ada, "tree", "right", signs=False)
    order = place.order("tree")
    refused(stranger.runs(order)[0], "is not signed")
    found = stranger.runs(order | {"url": f"{order['url']}@sha256:{digest}"})[0]
    assert (found["source"], found["because"]) == ("right", "the digest was requested")
    refused(stranger.runs(order | {"digest": "0" * 64})[0], error="NotFound")


# ---- folders of other users --------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[Path]:
    """pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.mark.system
@needs_root
@needs_program("setpriv")
def test_directories_of_several_users(shared: Path) -> None:
    before = os.umask(0o022)
    try:
        root = User(shared / "keys-0", "root")
        ada, eve = (User(shared / f"keys-{uid}", f"user{uid}", uid=uid) for uid in (NOBODY, SOMEBODY))
        for user, name in ((root, "roots"), (ada, "adas"), (eve, "eves")):
            user.publishes(str(shared / name), name, signs=False)

        def seen(user: User) -> list[str]:
            names = ("roots", "adas", "eves")
            found = user.runs(*({"do": "open", "url": str(shared / name)} for name in names))
            for name, each in zip(names, found, strict=True):
                if "error" in each:
                    refused(each, f"{shared / name} belongs to user", "`bootseer keys make`")
            return [each["source"] for each in found if "source" in each]

        assert seen(root) == ["roots"]
        assert seen(ada) == ["roots", "adas"]
        assert seen(eve) == ["roots", "eves"]
        ada.trusts(eve.make_key())
        eve.publishes(str(shared / "eves"), "eves")
        assert seen(ada) == ["roots", "adas", "eves"]
        assert seen(root) == ["roots"]

        # What everybody may write to is nobody's.
        (shared / "roots").chmod(0o777)
        refused(root.opens(str(shared / "roots")), "can be written to by others (mode 0777): chmod go-w")
        (shared / "roots").chmod(0o755)
        # A link of another user's to a tree of ours, which has its own name in it.
        link = shared / "link"
        link.symlink_to("roots")
        os.lchown(link, SOMEBODY, SOMEBODY)
        name = f"file://{shared}/roots"
        refused(root.opens(str(link), name=name), f"{link} belongs to user")
        link.unlink()
        link.symlink_to("roots")
        assert root.gets(str(link), name=name) == "roots"
        refused(root.opens(str(link)), "is the tree")

        # The key of a user is nobody else's.
        assert ada.key("show", status=1).stderr.startswith("bootseer: error: there is no key in")
        ada.make_key()
        assert os.stat(ada.keys / "own.pem").st_uid == NOBODY
        as_eve = User(shared / f"keys-{NOBODY}", f"user{NOBODY}", uid=SOMEBODY)
        assert "belongs to user" in as_eve.key("show", status=1).stderr
        as_root = User(shared / f"keys-{NOBODY}", f"user{NOBODY}")
        assert "belongs to user" in as_root.key("show", status=1).stderr
    finally:
        os.umask(before)


# ---- HDFS --------------------------------------------------------------------------------------------------


def test_hdfs_with_permissions(hdfs: MiniHdfs, users: Any) -> None:
    ada, bob, admin = (
        users(name, HADOOP_USER_NAME=hadoop) for name, hadoop in (("ada", "ada"), ("bob", "bob"), ("admin", ADMIN))
    )
    _as_admin(
        hdfs,
        "c.mkdirs('/home/ada', 0o755, True); c.set_owner('/home/ada', 'ada', 'ada');"
        "c.mkdirs('/scratch', 0o755, True); c.set_permission('/scratch', 0o1777)",
    )
    web = {"web": hdfs_cluster.web_of(hdfs)}
    for number, options in enumerate(({"web": ""}, web)):
        home, scratch = f"{hdfs.url}/home/ada/tree{number}", f"{hdfs.url}/scratch/tree{number}"
        for url in (home, scratch):
            ada.publishes(url, "ada's", options=options, signs=False)
            if url == scratch:  # HDFS makes folders with the permissions of the one above
                text = f"/scratch/tree{number} can be written to by others (mode 0777): hdfs dfs -chmod go-w"
                refused(ada.opens(url, options=options), text)
                _as_admin(hdfs, f"c.set_permission('/scratch/tree{number}', 0o755)")
            assert ada.gets(url, options=options) == "ada's"
            refused(bob.opens(url, options=options), "belongs to user ada, not to bob")
            refused(admin.opens(url, options=options), "belongs to user ada, not to")
        # As somebody else who says so in the URL.
        assert ada.gets(home.replace("//", "//ada@"), options=options) == "ada's"
        refused(ada.opens(home.replace("//", "//bob@"), options=options), "belongs to user ada, not to bob")

    ada.publishes(f"{hdfs.web_url}/home/ada/web", "ada's", signs=False)
    assert ada.gets(f"{hdfs.web_url}/home/ada/web") == "ada's"
    refused(bob.opens(f"{hdfs.web_url}/home/ada/web"), "belongs to user ada, not to bob")

    url, options = f"{hdfs.url}/home/ada/tree0", {"web": ""}
    for path, good, bad in (
        ("/home/ada/tree0/tree.json", 0o644, 0o664),
        ("/home/ada/tree0", 0o755, 0o1777),
        ("/home/ada", 0o755, 0o775),
        ("/home", 0o755, 0o777),
    ):
        _as_admin(hdfs, f"c.set_permission('{path}', {bad})")
        refused(ada.opens(url, options=options), f"{path} can be written to by others (mode {bad:04o})")
        _as_admin(hdfs, f"c.set_permission('{path}', {good})")
        assert ada.gets(url, options=options) == "ada's"

    bob.trusts(ada.make_key())
    ada.publishes(url, "signed", options=options)
    assert bob.opens(url, options=options)["because"].startswith("signed by ada")


def test_hdfs_that_lets_everybody_write(hdfs: MiniHdfs, users: Any, tmp_path: Path) -> None:
    """As its clients' configuration says."""
    shutil.copytree(hdfs.conf_folder, tmp_path / "conf")
    site = tmp_path / "conf" / "hdfs-site.xml"
    text = site.read_text()
    entry = "<property><name>dfs.permissions.enabled</name><value>false</value></property></configuration>"
    site.write_text(text.replace("</configuration>", entry))
    admin = ADMIN
    strict = users("strict", HADOOP_USER_NAME=admin)
    loose = users("loose", HADOOP_USER_NAME=admin, HADOOP_CONF_DIR=str(tmp_path / "conf"))
    url = f"{hdfs.url}/loose"
    strict.publishes(url, "anybody's", options={"web": ""}, signs=False)
    assert strict.gets(url, options={"web": ""}) == "anybody's"
    refused(loose.opens(url, options={"web": ""}), "dfs.permissions.enabled")


def _as_admin(hdfs: MiniHdfs, code: str) -> None:
    environ = {**clean_environ(), "HADOOP_USER_NAME": ADMIN}
    program = f"import hdfs_native; c = hdfs_native.Client({hdfs.url!r}); {code}"
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)


# ---- bootseer keys -----------------------------------------------------------------------------------------


def test_keys_from_making_to_forgetting(users: Any) -> None:
    ada, bob = users("ada"), users("bob")
    made = ada.key("make", "--name", "ada@work")
    line = made.stdout.splitlines()[0]
    assert line.startswith("ssh-ed25519 AAAA") and line.endswith(" ada@work")
    assert f"{ada.keys}/own.pem" in made.stdout and f"{ada.keys}/own.pub" in made.stdout
    (way,) = [text for text in made.stdout.splitlines() if "teammates trust it with: " in text]
    assert "PRIVATE" not in made.stdout + made.stderr
    again = ada.key("make", status=1)
    assert again.stderr.startswith("bootseer: error: ") and "already exists" in again.stderr
    shown = ada.key("show")
    assert shown.stdout == line + "\n" and "own.pem" in shown.stderr

    command = way.partition("with: ")[2].replace("bootseer keys trust -", "cat")
    (piped,) = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout.splitlines()
    assert piped == line
    told = bob.key("trust", "-", text=piped)
    reported_again = bob.key("trust", "-", "--json", text=piped)
    keyid = json.loads(ada.key("show", "--json").stdout)["keyid"]
    assert keyid in told.stdout
    (record,) = json.loads(reported_again.stdout)["keys"]
    assert (record["keyid"], record["name"], record["line"]) == (keyid, "ada@work", line)
    assert Path(record["path"]).read_text() == line + "\n"

    assert keyid[:16] in bob.key("list").stdout
    listed = json.loads(bob.key("list", "--json").stdout)
    assert ([each["keyid"] for each in listed["keys"]], listed["ignored"]) == ([keyid], [])
    Path(record["path"]).chmod(0o666)
    assert "not used: " in bob.key("list").stdout
    Path(record["path"]).chmod(0o644)
    assert keyid in bob.key("forget", keyid[:12]).stdout
    assert "no key is trusted" in bob.key("list").stdout
    assert "`bootseer keys list` lists them" in bob.key("forget", "ada@work", status=1).stderr
    assert "make one with `bootseer keys make`" in bob.key("show", status=1).stderr


def test_keys_from_files(users: Any, tmp_path: Path) -> None:
    ada, bob = users("ada"), users("bob")
    ada.make_key()
    bob.key("trust", ada.keys / "own.pub", "--name", "Ada\nL")
    assert "Ada L" in bob.key("list").stdout
    for data, text in (
        ((ada.keys / "own.pem").read_bytes(), "is a private key: give the public one beside it"),
        (b"ssh-rsa AAAA x", "is a key of kind ssh-rsa"),
        (b"", "holds no public key"), (b"\xff", "is not a public key"), (b"x" * 70_000, "is larger than 65536"),
    ):  # fmt: skip
        (tmp_path / "file").write_bytes(data)
        done = bob.key("trust", tmp_path / "file", status=1)
        assert done.stderr.startswith("bootseer: error: ") and text in done.stderr
        assert "PRIVATE" not in done.stderr
    assert "cannot be read: No such file" in bob.key("trust", tmp_path / "missing", status=1).stderr
    other = users("other")
    other.make_key()
    both = (ada.keys / "own.pub").read_text() + (other.keys / "own.pub").read_text()
    assert "one name is not enough" in bob.key("trust", "-", "--name", "x", text=both, status=1).stderr
    assert len(json.loads(bob.key("trust", "-", "--json", text=both).stdout)["keys"]) == 2


def test_keys_by_default(users: Any) -> None:
    """A name is found, folders are made; wrong words are said so."""
    ada = users("ada")
    record = json.loads(ada.key("make", "--json").stdout)
    assert "@" in record["name"] and record["private_path"] == f"{ada.keys}/own.pem"
    assert os.stat(record["private_path"]).st_mode & 0o777 == 0o600
    assert "Usage" in ada.key("make", "--unknown", status=2).stderr
    assert "make" in ada.key("--help").stdout
    assert "bootseer keys trust ada.pub" in ada.key("trust", "--help").stdout
