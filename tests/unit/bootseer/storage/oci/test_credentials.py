"""Passwords of registries: files of docker and podman, helper programs, and that none is ever shown."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import ConfigError
from bootseer.storage.oci import credentials as oci_credentials
from bootseer.storage.oci.credentials import Credentials, find_credentials, shown_files
from bootseer.storage.oci.options import RegistryPlace, origin_of
from bootseer.storage.oci.reference import parse_reference

SECRET = "s3cret/word:with=signs"


def packed(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def place(name: str = "registry:5000/team/app") -> RegistryPlace:
    return origin_of(parse_reference(name))


def write(path: Path, config: Any) -> str:
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes down how it was called; a test says what `docker-credential-test` answers."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory / "docker-credential-test"


def make_helper(path: Path, answer: str, status: int = 0) -> None:
    path.write_text(
        f"#!/bin/sh\necho \"$@\" >> '{path}.args'\ncat >> '{path}.stdin'\necho noise >&2\n"
        f"cat <<'EOF'\n{answer}\nEOF\nexit {status}\n"
    )
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("auths", "name", "expected"),
    [
        ({"registry:5000": {"auth": packed("me", SECRET)}}, "registry:5000/a/b", ("me", SECRET, "")),
        ({"registry:5000": {"username": "me", "password": SECRET}}, "registry:5000/a", ("me", SECRET, "")),
        ({"registry:5000": {"auth": packed("me", ""), "identitytoken": "t"}}, "registry:5000/a", ("me", "", "t")),
        ({"registry:5000": {"identitytoken": "t"}}, "registry:5000/a", ("", "", "t")),
        ({"registry": {"auth": packed("me", "x")}}, "registry:5000/a", None),
        ({"https://registry:5000": {"auth": packed("me", "x")}}, "registry:5000/a", ("me", "x", "")),
        ({"https://registry:5000/v2/": {"auth": packed("me", "x")}}, "registry:5000/a", ("me", "x", "")),
        ({"https://index.docker.io/v1/": {"auth": packed("me", "x")}}, "docker.io/a/b", ("me", "x", "")),
        ({"docker.io": {"auth": packed("me", "x")}}, "docker.io/a/b", ("me", "x", "")),
        (
            {
                "registry:5000": {"auth": packed("all", "x")},
                "registry:5000/team": {"auth": packed("team", "x")},
                "registry:5000/team/app": {"auth": packed("app", "x")},
                "registry:5000/te": {"auth": packed("no", "x")},
            },
            "registry:5000/team/other",
            ("team", "x", ""),
        ),
        ({"registry:5000/team/app": {"auth": packed("app", "x")}}, "registry:5000/team/app", ("app", "x", "")),
        ({"registry:5000/team/app": {"auth": packed("app", "x")}}, "registry:5000/team", None),
        ({"registry:5000": {}}, "registry:5000/a", None),
        ({}, "registry:5000/a", None),
        (None, "registry:5000/a", None),
    ],
)
def test_files(tmp_path: Path, auths: Any, name: str, expected: tuple[str, str, str] | None) -> None:
    path = write(tmp_path / "config.json", {"auths": auths, "HttpHeaders": {"X": "y"}})
    found = find_credentials(place(name), [str(tmp_path / "missing.json"), path])
    assert (found and found[:3]) == expected
    if found is not None:
        assert found.source == path
        assert SECRET not in repr(found)


def test_the_first_file_that_knows_counts(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a", {"auths": {"elsewhere": {"auth": packed("a", "x")}}}),
        write(tmp_path / "b", {"auths": {"registry:5000": {"auth": packed("b", "x")}}}),
        write(tmp_path / "c", {"auths": {"registry:5000": {"auth": packed("c", "x")}}}),
    ]
    found = find_credentials(place(), files)
    assert found is not None
    assert found.user == "b"
    assert shown_files([files[1], str(tmp_path / "no")]) == files[1]
    assert shown_files(["/no/where"]) == "/no/where"


@pytest.mark.parametrize(
    "config",
    [
        "", "{", "[]", '"x"', "{" * 100_000, {"auths": 7}, {"credHelpers": ["x"]},
        {"auths": {"registry:5000": {"auth": "no base64 " + SECRET}}},
        {"auths": {"registry:5000": {"auth": base64.b64encode(SECRET.replace(":", "").encode()).decode()}}},
        {"auths": {"registry:5000": {"auth": base64.b64encode(b"\xff\xfe:x").decode()}}},
        {"auths": {"registry:5000": {"username": "me", "password": 7}}},
    ],
)  # fmt: skip
def test_files_that_are_not_understood(tmp_path: Path, config: Any) -> None:
    path = write(tmp_path / "config.json", config)
    with pytest.raises(ConfigError) as caught:
        find_credentials(place(), [path])
    shown = str(caught.value)
    assert path in shown
    assert "log in again" in shown or "object" in shown
    assert SECRET[:6] not in shown
    # Nor by what it was raised from, which a traceback would show.
    assert caught.value.__cause__ is None


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = write(tmp_path / "config.json", '{"auths": {}}' + " " * (1 << 20))
    with pytest.raises(ConfigError, match="not a JSON object"):
        find_credentials(place(), [path])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        find_credentials(place(), [str(tmp_path)])


# ---- helpers -------------------------------------------------------------------------------------------------

ANSWER = json.dumps({"ServerURL": "registry:5000", "Username": "me", "Secret": SECRET})


@pytest.mark.parametrize(
    ("config", "name", "asked"),
    [
        ({"credHelpers": {"registry:5000": "test"}}, "registry:5000/team/app", "registry:5000"),
        ({"credHelpers": {"registry:5000": "test"}, "credsStore": "none"}, "registry:5000/a", "registry:5000"),
        (
            {"credHelpers": {"registry:5000": "test"}, "auths": {"registry:5000": {"auth": packed("old", "x")}}},
            "registry:5000/a",
            "registry:5000",
        ),
        ({"credsStore": "test"}, "registry:5000/a", "registry:5000"),
        (
            {"credsStore": "test", "auths": {"https://registry:5000": {}}},
            "registry:5000/a",
            "https://registry:5000",
        ),
        ({"credsStore": "test"}, "docker.io/a/b", "https://index.docker.io/v1/"),
    ],
)
def test_helpers(tmp_path: Path, helper: Path, config: Any, name: str, asked: str) -> None:
    make_helper(helper, ANSWER)
    found = find_credentials(place(name), [write(tmp_path / "config.json", config)])
    assert found is not None
    assert (found.user, found.password) == ("me", SECRET)
    assert found.source == "docker-credential-test"
    # The name goes by stdin, as the protocol has it, and nothing by arguments, which everybody can read.
    assert Path(f"{helper}.stdin").read_text() == asked
    assert Path(f"{helper}.args").read_text() == "get\n"


def test_a_helper_with_an_identity_token(tmp_path: Path, helper: Path) -> None:
    make_helper(helper, json.dumps({"Username": "<token>", "Secret": "refresh"}))
    found = find_credentials(place(), [write(tmp_path / "c", {"credsStore": "test"})])
    assert found == Credentials("", "", "refresh", "docker-credential-test")


def test_a_helper_that_knows_nothing(tmp_path: Path, helper: Path) -> None:
    make_helper(helper, "credentials not found in native keychain", status=1)
    assert find_credentials(place(), [write(tmp_path / "c", {"credsStore": "test"})]) is None


@pytest.mark.parametrize(
    ("answer", "status", "match"),
    [
        (f"it broke over {SECRET}", 3, "exit status 3"),
        (f"no JSON {SECRET}", 0, "invalid answer"),
        (json.dumps({"Username": "me", "Password": SECRET}), 0, "invalid answer"),
        (json.dumps({"Username": "me", "Secret": [SECRET]}), 0, "invalid answer"),
    ],
)
def test_helpers_that_fail(tmp_path: Path, helper: Path, answer: str, status: int, match: str) -> None:
    make_helper(helper, answer, status)
    with pytest.raises(ConfigError, match=match) as caught:
        find_credentials(place(), [write(tmp_path / "c", {"credsStore": "test"})])
    assert "echo registry:5000 | docker-credential-test get" in str(caught.value), "the way out"
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_helper_that_hangs(tmp_path: Path, helper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci_credentials, "HELPER_TIMEOUT_S", 0.2)
    helper.write_text("#!/bin/sh\nexec sleep 60\n")
    helper.chmod(0o755)
    with pytest.raises(ConfigError, match=r"within 0\.2 s"):
        find_credentials(place(), [write(tmp_path / "c", {"credsStore": "test"})])


@pytest.mark.parametrize("name", ["../test", "a/b", "-x", "a b", "", "$(id)"])
def test_names_of_helpers_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a name of a credential helper"):
        find_credentials(place(), [write(tmp_path / "c", {"credHelpers": {"registry:5000": name}})])


def test_a_helper_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"docker-credential-nowhere .*not installed"):
        find_credentials(place(), [write(tmp_path / "c", {"credsStore": "nowhere"})])
