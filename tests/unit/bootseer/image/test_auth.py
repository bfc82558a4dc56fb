"""Passwords and tokens against a registry in this process: who is asked for what, how often, and what is shown."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import BootseerError, PermissionDenied, StorageError, Unavailable
from bootseer.image.registry import Registry
from bootseer.storage.oci.manifest import Descriptor
from bootseer.storage.oci.reference import Reference, parse_reference
from tests.testing.registry import write_auth_file
from tests.testing.store_suite import runs
from tests.unit.bootseer.image.small_registry import SmallRegistry

PASSWORD = "pass/word"
DATA = b"some bytes of a layer" * 100


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def small() -> Iterator[SmallRegistry]:
    registry = SmallRegistry(auth="bearer")
    with registry.serve():
        registry.add_blob(DATA)
        yield registry


@pytest.fixture
def auth_file(tmp_path: Path) -> str:
    path = str(tmp_path / "auth.json")
    write_auth_file(path, {})
    return path


def options_of(auth_file: str, **more: Any) -> dict[str, object]:
    return {"auth_file": auth_file, "certs_folders": [], "mirrors": "", "plain_http": "", **more}


def reference_to(small: SmallRegistry, repository: str = "team/app") -> Reference:
    return parse_reference(f"oci://{small.host}/{repository}:v1")


async def read_blob(registry: Registry, small: SmallRegistry, repository: str = "team/app") -> bytes:
    digest = next(iter(small.blobs))
    blob = Descriptor(media_type="text/plain", digest=digest, size=len(small.blobs[digest]))
    return await registry.read_blob(reference_to(small, repository), blob)


def log_in(auth_file: str, small: SmallRegistry, password: str = PASSWORD) -> None:
    write_auth_file(auth_file, {small.host: ("me", password)})


def secrets_in(error: BaseException) -> bool:
    """Whether a traceback of it would show one."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{seen} {seen!r} {getattr(seen, '__notes__', '')}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return any(secret in text for text in texts for secret in (PASSWORD, "bWU6cGFzcy93b3Jk", "token-", "se+cret"))


# ---- who is asked for what -----------------------------------------------------------------------------------


@runs()
async def test_a_token_for_everybody(small: SmallRegistry, auth_file: str) -> None:
    async with Registry(options=options_of(auth_file)) as registry:
        assert await read_blob(registry, small) == DATA
    token = next(each for each in small.seen if each.path == "/token")
    assert token.authorization == ""
    assert (token.query["service"], token.query["scope"]) == (["tests"], ["repository:team/app:pull"])


@runs()
async def test_a_token_for_a_password_is_kept(small: SmallRegistry, auth_file: str) -> None:
    log_in(auth_file, small)
    async with Registry(options=options_of(auth_file)) as registry:
        for _ in range(5):
            assert await read_blob(registry, small) == DATA
        assert small.given == 1
        assert small.count("GET /v2/team/app/.*") == 6, "asked without a token once, then always with it"
        assert await read_blob(registry, small, "other") == DATA
        assert small.given == 2, "tokens are for a repository"
    for each in small.seen:
        expected = "Basic bWU6cGFzcy93b3Jk" if each.path == "/token" else ("", "Bearer token-1", "Bearer token-2")
        assert each.authorization in expected


@runs()
async def test_a_password_where_no_tokens_are_known(small: SmallRegistry, auth_file: str) -> None:
    small.auth = "basic"
    log_in(auth_file, small)
    async with Registry(options=options_of(auth_file)) as registry:
        for _ in range(3):
            assert await read_blob(registry, small) == DATA
    asked = [each.authorization for each in small.seen if "/blobs/" in each.path]
    assert asked == ["", *["Basic bWU6cGFzcy93b3Jk"] * 3]


@runs()
async def test_tokens_that_expire_meanwhile(small: SmallRegistry, auth_file: str) -> None:
    log_in(auth_file, small)
    async with Registry(options=options_of(auth_file)) as registry:
        for turn in range(1, 4):
            assert await read_blob(registry, small) == DATA
            assert small.given == turn
            small.revoke()
        assert registry.statistics()["retries"] == 0


@runs()
async def test_tokens_are_renewed_before_they_expire(small: SmallRegistry, auth_file: str) -> None:
    small.expires_in = 0.001
    async with Registry(options=options_of(auth_file)) as registry:
        await read_blob(registry, small)
        time.sleep(0.002)
        await read_blob(registry, small)
    assert small.given == 2
    assert small.count("GET /v2/team/app/.*") == 3, "it was not refused a second time"


@runs()
async def test_many_at_once_share_a_token(small: SmallRegistry, auth_file: str) -> None:
    async with Registry(options=options_of(auth_file)) as registry:
        for turn in (1, 2):
            async with asyncio.TaskGroup() as group:
                for _ in range(24):
                    group.create_task(read_blob(registry, small))
            assert small.given == turn
            small.revoke()


@runs()
async def test_an_identity_token_is_exchanged(small: SmallRegistry, auth_file: str) -> None:
    small.identity_tokens = {"refresh"}
    Path(auth_file).write_text(json.dumps({"auths": {small.host: {"auth": "", "identitytoken": "refresh"}}}))
    async with Registry(options=options_of(auth_file)) as registry:
        assert await read_blob(registry, small) == DATA
    (asked,) = [each for each in small.seen if each.method == "POST"]
    assert asked.authorization == ""
    assert asked.headers == {
        "service": "tests", "client_id": "bootseer", "grant_type": "refresh_token",
        "scope": "repository:team/app:pull", "refresh_token": "refresh",
    }  # fmt: skip


@runs()
async def test_a_helper_whose_passwords_change(
    small: SmallRegistry, auth_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of cloud registries, which hold for hours."""
    small.auth = "basic"
    helper = tmp_path / "docker-credential-cloud"
    answer = tmp_path / "answer"
    helper.write_text(f"#!/bin/sh\necho asked >> '{tmp_path}/asked'\ncat '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path(auth_file).write_text(json.dumps({"credHelpers": {small.host: "cloud"}}))
    async with Registry(options=options_of(auth_file)) as registry:
        for password in ("first", "second", "third"):
            small.passwords = {"me": password}
            answer.write_text(json.dumps({"Username": "me", "Secret": password}))
            for _ in range(3):
                assert await read_blob(registry, small) == DATA
    assert (tmp_path / "asked").read_text().count("asked") == 3, "once, and again when refused"


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("auth", ["basic", "bearer"])
@runs()
async def test_a_wrong_password(auth: str, small: SmallRegistry, auth_file: str) -> None:
    small.auth = auth
    log_in(auth_file, small, PASSWORD)
    small.passwords = {"me": "another"}
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(PermissionDenied, match=f"refuses the password of {auth_file}") as caught:
            await read_blob(registry, small)
    assert f"docker login {small.host}" in str(caught.value)
    assert not secrets_in(caught.value)
    assert len(small.seen) < 8, "and is not tried for ever"


@runs()
async def test_no_password(small: SmallRegistry, auth_file: str) -> None:
    small.auth = "basic"
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(PermissionDenied, match=f"none for {small.host} in {auth_file}"):
            await read_blob(registry, small)


@runs()
async def test_a_token_that_allows_too_little(small: SmallRegistry, auth_file: str) -> None:
    log_in(auth_file, small)
    small.token_answers = [(200, {}, b'{"token": "of-no-use"}')] * 5
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(PermissionDenied):
            await read_blob(registry, small)
    assert small.count("GET /v2/team/app/.*") <= 3


@runs()
async def test_a_401_that_does_not_say_how(small: SmallRegistry, auth_file: str) -> None:
    small.statuses = [(401, {}, b"")]
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(PermissionDenied, match="without a known challenge"):
            await read_blob(registry, small)


@pytest.mark.parametrize(
    ("realm", "match"),
    [
        ("http://elsewhere.example/token", "unencrypted"),
        ("ftp://elsewhere.example/token", "not a URL"),
        ("https://me:pw@elsewhere.example/token", "not a URL"),
        ("https://elsewhere.example:port/token", "not a URL"),
        ("/token", "not a URL"),
        ("file:///etc/passwd", "not a URL"),
    ],
)
@runs()
async def test_passwords_are_not_sent_anywhere(
    realm: str, match: str, small: SmallRegistry, auth_file: str
) -> None:
    log_in(auth_file, small)
    small.realm = realm
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(StorageError, match=match) as caught:
            await read_blob(registry, small)
    assert not secrets_in(caught.value)
    assert "pw@" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((200, {}, b"{}"), StorageError),
        ((200, {}, b"no JSON"), StorageError),
        ((200, {}, b'{"token": 7}'), StorageError),
        ((200, {}, b'{"token": "a\\r\\nX-Evil: 1"}'), StorageError),
        ((200, {}, b'{"token": "x", "expires_in": "soon"}'), StorageError),
        ((200, {}, b"[" * 60_000), StorageError),
        ((200, {}, b'{"token": "' + b"x" * 200_000 + b'"}'), StorageError),
        ((403, {}, b"{}"), PermissionDenied),
        ((418, {}, b"{}"), StorageError),
    ],
)
@runs()
async def test_answers_that_are_no_tokens(
    answer: tuple[int, dict[str, str], bytes], error: type[BootseerError], small: SmallRegistry, auth_file: str
) -> None:
    small.token_answers = [answer] * 9
    async with Registry(options=options_of(auth_file)) as registry:
        with pytest.raises(error) as caught:
            await read_blob(registry, small)
    assert type(caught.value) is error


@runs(limit_s=30.0)
async def test_a_server_of_tokens_that_is_busy(small: SmallRegistry, auth_file: str) -> None:
    small.token_answers = [(503, {}, b""), (429, {"Retry-After": "1"}, b"")]
    async with Registry(options=options_of(auth_file)) as registry:
        started_s = time.monotonic()
        assert await read_blob(registry, small) == DATA
        assert time.monotonic() - started_s >= 1.0, "it is given the time that it asked for"
        assert registry.statistics()["retries"] == 2


@runs()
async def test_secrets_that_are_repeated_are_not_shown(small: SmallRegistry, auth_file: str) -> None:
    log_in(auth_file, small)
    said = json.dumps({"errors": [{"code": "X", "message": f"got token-1 and {PASSWORD}"}]}).encode()
    async with Registry(options=options_of(auth_file)) as registry:
        await read_blob(registry, small)
        small.statuses = [(403, {}, said)]
        with pytest.raises(PermissionDenied, match=r"got \*\*\* and \*\*\*") as caught:
            await read_blob(registry, small)
    assert not secrets_in(caught.value)


# ---- other servers -------------------------------------------------------------------------------------------


@runs()
async def test_no_password_goes_along_with_a_redirect(small: SmallRegistry, auth_file: str) -> None:
    elsewhere = SmallRegistry()
    with elsewhere.serve():
        elsewhere.blobs = small.blobs
        small.redirect_to = elsewhere.url
        log_in(auth_file, small)
        async with Registry(options=options_of(auth_file)) as registry:
            assert await read_blob(registry, small) == DATA
            assert await read_blob(registry, small) == DATA
            assert small.count("GET .*/blobs/.*") == 2, "refused once, redirected once: then it is known"
            assert [each.authorization for each in elsewhere.seen] == ["", ""]
            assert elsewhere.seen[0].query == {"sig": ["se cret"]}
            elsewhere.statuses = [(403, {}, b"expired")]
            assert await read_blob(registry, small) == DATA, "what has expired is asked for anew"
            assert small.count("GET .*/blobs/.*") == 3
            elsewhere.statuses = [(403, {}, b"")] * 2
            with pytest.raises(PermissionDenied) as caught:
                await read_blob(registry, small)
            assert not secrets_in(caught.value)
            elsewhere.statuses = [(401, {"WWW-Authenticate": 'Basic realm="give"'}, b"")] * 2
            with pytest.raises(PermissionDenied):
                await read_blob(registry, small)
    assert {each.authorization for each in elsewhere.seen} == {""}, "nor when it asks for one"


@runs(limit_s=30.0)
async def test_a_registry_that_is_busy(small: SmallRegistry, auth_file: str) -> None:
    small.auth = ""
    small.statuses = [(429, {"Retry-After": "1"}, b""), (503, {}, b"")]
    async with Registry(options=options_of(auth_file)) as registry:
        started_s = time.monotonic()
        assert await read_blob(registry, small) == DATA
        assert time.monotonic() - started_s >= 1.0
        assert registry.statistics()["retries"] == 2
        small.statuses = [(429, {"Retry-After": "3000"}, b'{"errors": [{"message": "pull rate limit"}]}')]
        with pytest.raises(Unavailable, match=r"429.*pull rate limit"):
            await read_blob(registry, small)  # nobody waits for so long
