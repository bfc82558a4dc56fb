"""Who may read the dashboard: addresses, names, origins and tokens."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from launcher.base.listen_address import Address, parse_address
from launcher.serve.access import Access, split_host

TOKEN = b"sixteen-bytes-or-more"
LOCAL = Access(Address("127.0.0.1", 8484), None)
OPEN = Access(Address("0.0.0.0", 8484), TOKEN, ["node-a"])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("", "127.0.0.1", 8484),
        ("9000", "127.0.0.1", 9000),
        (":9000", "0.0.0.0", 9000),
        ("0", "127.0.0.1", 0),
        ("node-a", "node-a", 8484),
        ("node-a:1", "node-a", 1),
        ("10.1.2.3:65535", "10.1.2.3", 65535),
        ("[::1]:9", "::1", 9),
        ("[::1]", "::1", 8484),
        ("::1", "::1", 8484),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert parse_address(str(Address(host, port))) == (host, port), "as it is shown"


@pytest.mark.parametrize("text", ["a:b", "a:65536", "a:-1", "[::1]:x", ":٣"])
def test_what_is_no_port_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="is not a port; give HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert Access(Address(host, 1), None).check(f"{Address(host, 1)}", None, None) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-a"])
def test_others_need_one(host: str) -> None:
    with pytest.raises(UsageError, match="so --token-file FILE is required"):
        Access(Address(host, 1), None)


@pytest.mark.parametrize("host", [None, "", "evil.example", "evil.example:8484", "127.0.0.1.example", "10.0.0.1"])
def test_an_unknown_name_is_refused(host: str | None) -> None:
    refusal = LOCAL.check(host, None, None)
    assert refusal is not None
    assert refusal.status == 421


def test_with_a_token_an_address_of_any_form_will_do() -> None:
    right = f"Bearer {TOKEN.decode()}"
    for host in ("10.0.0.1:8484", "[fe80::1]:8484", "node-a", "NODE-A.:8484", "localhost"):
        assert OPEN.check(host, None, right) is None
    assert (OPEN.check("evil.example", None, right) or (0,))[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:9", ""])
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    refusal = LOCAL.check("localhost:8484", origin, None)
    assert refusal is not None
    assert refusal.status == 403


def test_its_own_page_is_not() -> None:
    assert LOCAL.check("localhost:8484", "http://localhost:8484", None) is None
    assert LOCAL.check("LocalHost:8484", "https://localhost:8484", None) is None


def basic(user: bytes, password: bytes) -> str:
    return "Basic " + base64.b64encode(user + b":" + password).decode()


def test_the_token_is_a_bearers_or_a_password() -> None:
    token = TOKEN.decode()
    for right in (f"Bearer {token}", f"bearer  {token}", basic(b"any", TOKEN), basic(b"", TOKEN)):
        assert OPEN.check("node-a", None, right) is None


@given(st.one_of(st.none(), st.text(max_size=60), st.builds(basic, st.binary(max_size=9), st.binary(max_size=30))))
def test_nothing_else_is(given_header: str | None) -> None:
    refusal = OPEN.check("node-a", None, given_header)
    assert refusal is not None
    assert refusal.status == 401
    assert TOKEN.decode() not in refusal.reason


@given(st.text(max_size=40))
def test_any_host_is_only_a_name(header: str) -> None:
    assert len(split_host(header)) <= len(header)
