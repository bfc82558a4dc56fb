"""Where keys lie: made for one user alone, and files that others could have written are none."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import ConfigError, NotFound
from bootseer.trust import KeyDirectory, PublicKey, SigningKey, Trust
from bootseer.trust.key_folder import MAX_FILES
from tests.support import needs_program

OTHER = 65534


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> KeyDirectory:
    return KeyDirectory(str(tmp_path / "config" / "keys"), system_trusted=str(tmp_path / "system"))


def public(name: str) -> PublicKey:
    return PublicKey(SigningKey.make().public, name)


def mode_of(path: str | os.PathLike[str]) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_new_key(folder: KeyDirectory) -> None:
    assert folder.read_private() is None and folder.read_public() is None
    assert folder.read_trusted() == ((), ())
    key = folder.make("ada\n@work")
    assert (mode_of(folder.path), mode_of(os.path.dirname(folder.path))) == (0o700, 0o700)
    assert (mode_of(folder.private_path), mode_of(folder.public_path)) == (0o600, 0o644)
    assert sorted(os.listdir(folder.path)) == ["own.pem", "own.pub"]
    found = folder.read_private()
    assert found is not None and (found.public, found.name) == (key.public, "ada @work")
    assert folder.read_public() == PublicKey(key.public, "ada @work")
    ((trusted,), ignored) = folder.read_trusted()
    assert (trusted.key.raw, trusted.path, ignored) == (key.public, folder.public_path, ())


def test_modes_are_not_left_to_the_umask(folder: KeyDirectory) -> None:
    os.umask(0o077)
    folder.make("ada")
    paths = [folder.public_path, folder.add(public("bob"))]
    assert [mode_of(path) for path in [folder.private_path, *paths]] == [0o600, 0o644, 0o644]


def test_a_key_is_never_written_over(folder: KeyDirectory) -> None:
    folder.make("ada")
    before = Path(folder.private_path).read_bytes()
    for name in ("own.pub", "own.pem"):
        with pytest.raises(ConfigError, match=r"own\.(pem|pub) already exists: .*move it away first"):
            folder.make("ada")
        assert Path(folder.private_path).read_bytes() == before
        if name == "own.pub":
            os.unlink(folder.public_path)
    assert sorted(os.listdir(folder.path)) == ["own.pem"]
    found = folder.read_public()  # the private one has it in it
    assert found is not None and found.name == ""
    os.unlink(folder.private_path)
    os.symlink("elsewhere", folder.private_path)
    with pytest.raises(ConfigError, match="already exists"):
        folder.make("ada")
    assert not os.path.exists(os.path.join(folder.path, "elsewhere"))


def test_two_that_make_one_at_once(folder: KeyDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds none when it looks, and one when it writes."""
    from bootseer.trust import key_folder

    first = folder.make("first")
    os.unlink(folder.public_path)
    monkeypatch.setattr(key_folder.os.path, "lexists", lambda path: path.endswith(".new"))
    with pytest.raises(ConfigError, match=r"own\.pem already exists"):
        folder.make("second")
    monkeypatch.undo()
    found = folder.read_private()
    assert found is not None and found.public == first.public
    assert os.listdir(folder.path) == ["own.pem"], "nothing is left lying about"


def test_no_key_is_made_where_it_would_not_be_trusted(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for place in ("open", "open/keys"):
        with pytest.raises(ConfigError, match=r"would not be trusted: .*/open can be written to by others"):
            KeyDirectory(str(tmp_path / place)).make("ada")
        assert not (tmp_path / place / "own.pem").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        KeyDirectory(str(tmp_path / "file" / "keys")).make("ada")
    with pytest.raises(ConfigError, match="file"):
        KeyDirectory(str(tmp_path / "file")).make("ada")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_private_key_that_others_can_read_is_not_used(folder: KeyDirectory, mode: int) -> None:
    folder.make("ada")
    os.chmod(folder.private_path, mode)
    with pytest.raises(ConfigError, match=r"^the private key is not used: .*own\.pem can be (read|written)"):
        folder.read_private()
    assert len(folder.read_trusted().keys) == 1, "what it signed before is still its"
    os.unlink(folder.public_path)
    (keys, (reason,)) = folder.read_trusted()
    assert keys == () and "own.pem can be" in reason


def test_keys_that_others_can_write_are_not_trusted(folder: KeyDirectory) -> None:
    folder.make("me")
    ada, eve = public("ada"), public("eve")
    paths = [folder.add(ada), folder.add(eve)]
    assert [mode_of(path) for path in paths] == [0o644, 0o644]
    os.chmod(paths[1], 0o666)
    os.chmod(folder.public_path, 0o664)
    keys, ignored = folder.read_trusted()
    assert [each.key.name for each in keys] == ["ada"]
    assert len(ignored) == 2 and all("can be written to by others" in reason for reason in ignored)
    with pytest.raises(ConfigError, match="already exists and is not used: `bootseer keys list` shows why"):
        folder.add(eve)
    os.chmod(folder.trusted_path, 0o777)
    assert folder.read_trusted().keys == ()
    with pytest.raises(ConfigError, match="would not be trusted"):
        folder.add(public("bob"))


def test_trusting_and_forgetting(folder: KeyDirectory) -> None:
    me = folder.make("me")
    ada, bob, odd = public("ada"), public("../../bob b"), public("")
    path = folder.add(ada)
    assert folder.add(ada) == folder.add(ada._replace(name="other")) == path, "once"
    assert Path(path).read_text() == ada.line + "\n"
    others = [folder.add(bob), folder.add(odd)]
    assert {os.path.dirname(each) for each in [path, *others]} == {folder.trusted_path}
    assert os.path.basename(others[0]) == f"bob-b-{bob.keyid[:8]}.pub"
    assert os.path.basename(others[1]) == f"key-{odd.keyid[:8]}.pub"
    assert {each.key for each in folder.read_trusted().keys} == {PublicKey(me.public, "me"), ada, bob, odd}
    assert folder.add(PublicKey(me.public, "again")) == folder.public_path

    with pytest.raises(NotFound, match="no trusted key is named 'nobody': `bootseer keys list`"):
        folder.forget("nobody")
    for short in ("", bob.keyid[:3]):
        with pytest.raises(NotFound):
            folder.forget(short)
    with pytest.raises(ConfigError, match=r"own\.pub is not in .*trusted"):
        folder.forget("me")
    assert [each.key for each in folder.forget("ada")] == [ada]
    assert [each.key for each in folder.forget(bob.keyid[:4].upper())] == [bob]
    assert [each.key for each in folder.forget(odd.fingerprint)] == [odd]
    assert [each.key.name for each in folder.read_trusted().keys] == ["me"]
    assert os.listdir(folder.trusted_path) == []


def test_names_that_mean_several(folder: KeyDirectory) -> None:
    one, two = public("ada"), public("ada")
    folder.add(one)
    folder.add(two)
    with pytest.raises(ConfigError, match="'ada' means several keys: name one by its keyid"):
        folder.forget("ada")
    assert len(folder.read_trusted().keys) == 2
    assert [each.key for each in folder.forget(one.keyid)] == [one]
    assert [each.key for each in folder.read_trusted().keys] == [two]


def test_files_that_people_put_there(folder: KeyDirectory) -> None:
    folder._make_directory(folder.trusted_path)
    trusted = Path(folder.trusted_path)
    ada, bob = public("ada"), public("bob")
    team = trusted / "team.pub"
    team.write_text(f"# team\n{ada.line}\n\n{bob.line}\n")
    for name, text in (
        ("rsa.pub", "ssh-rsa AAAA eve"), ("bad.pub", "nonsense"), ("large.pub", "#" * 70_000),
        ("notes.txt", "x"), (".hidden.pub", ada.line), ("empty.pub", ""),
    ):  # fmt: skip
        (trusted / name).write_text(text)
    (trusted / "latin.pub").write_bytes(b"\xff\xfe")
    (trusted / "dangling.pub").symlink_to("nothing")
    (trusted / "folder.pub").mkdir()
    for path in trusted.iterdir():
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    keys, ignored = folder.read_trusted()
    assert [each.key for each in keys] == [ada, bob]
    assert sorted(reason.split(".pub")[0].rpartition("/")[2] for reason in ignored) == [
        "bad", "folder", "large", "latin", "rsa",
    ]  # fmt: skip
    assert [each.key for each in folder.forget("ada")] == [ada]
    assert team.read_text() == f"# team\n\n{bob.line}\n", "the others of its file stay"
    assert mode_of(team) == 0o644
    folder.forget("bob")
    assert not team.exists()


def test_many_files(folder: KeyDirectory) -> None:
    folder._make_directory(folder.trusted_path)
    for number in range(MAX_FILES + 1):
        (Path(folder.trusted_path) / f"{number:05}.pub").touch()
    assert f"only the first {MAX_FILES} are read" in folder.read_trusted().ignored[0]


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users can be made by root only")
def test_keys_that_root_trusts(folder: KeyDirectory, tmp_path: Path) -> None:
    system = tmp_path / "system"
    system.mkdir()
    system.chmod(0o755)
    ada = public("ada")
    (system / "ada.pub").write_text(ada.line)
    (system / "ada.pub").chmod(0o644)
    assert [each.key for each in folder.read_trusted().keys] == [ada]
    with pytest.raises(ConfigError, match="its owner has to remove it"):
        folder.forget("ada")
    os.chown(system / "ada.pub", OTHER, OTHER)
    keys, (reason,) = folder.read_trusted()
    assert keys == () and reason.endswith("not to root")
    os.chown(system / "ada.pub", 0, 0)
    system.chmod(0o775)
    keys, (reason,) = folder.read_trusted()
    assert keys == () and "system can be written to by others (mode 0775)" in reason


def test_root_alone_decides_for_everybody(tmp_path: Path) -> None:
    """Files of this user in root's place are none, unless this user is root."""
    if os.geteuid() == 0:
        pytest.skip("root's files are root's")
    folder = KeyDirectory(str(tmp_path / "keys"), system_trusted=str(tmp_path))
    (tmp_path / "ada.pub").write_text(public("ada").line)
    (tmp_path / "ada.pub").chmod(0o644)
    assert folder.read_trusted().keys == ()


def test_a_directory_of_kubernetes(folder: KeyDirectory) -> None:
    """A secret is mounted as links to a folder that is exchanged as a whole."""
    key = SigningKey.make()
    version = Path(folder.path) / "..2026_01_01"
    folder._make_directory(str(version))
    version.chmod(0o755)
    (version / "own.pem").write_bytes(key.to_pem())
    (version / "own.pem").chmod(0o400)
    (Path(folder.path) / "..data").symlink_to("..2026_01_01")
    (Path(folder.path) / "own.pem").symlink_to("..data/own.pem")
    Path(folder.path).chmod(0o1777)
    found = folder.read_private()
    assert found is not None and found.public == key.public


@needs_program("ssh-keygen")
def test_keys_of_openssh_are_trusted(folder: KeyDirectory, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ada", "-f", tmp_path / "id"], check=True)
    folder._make_directory(folder.trusted_path)
    shutil.copy(tmp_path / "id.pub", folder.trusted_path)
    ((found,), ignored) = folder.read_trusted()
    assert (found.key.name, ignored) == ("ada", ())


def test_where_keys_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    find = KeyDirectory.find
    assert find({"BOOTSEER_KEYS": "/k", "HOME": "/h", "XDG_CONFIG_HOME": "/x"}).path == "/k"
    assert find({"BOOTSEER_KEYS": "", "HOME": "/h", "XDG_CONFIG_HOME": "/x"}).path == "/x/bootseer/keys"
    assert find({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}).path == "/h/.config/bootseer/keys"
    monkeypatch.setenv("HOME", "/set")
    assert find({}).path == "/set/.config/bootseer/keys"
    assert find().path == find(os.environ).path


def test_trust_is_loaded_from_there(folder: KeyDirectory) -> None:
    environ = {"BOOTSEER_KEYS": folder.path}
    assert Trust.load(environ).signing_key() is None
    assert not os.path.exists(folder.path), "looking makes nothing"
    key = folder.make("me")
    folder.add(public("ada"))
    trust = Trust.load(environ)
    assert {"me", "ada"} <= {each.key.name for each in trust.trusted}
    signing = trust.signing_key()
    assert signing is not None and signing.public == key.public
    assert Trust().signing_key() is None
    os.chmod(folder.private_path, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Trust.load(environ).signing_key()
