"""Nothing of a request can be changed, sent again, or sent to somebody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers.auth import Handshake, derive_key, origin_id

KEY = derive_key(b"a secret of the job", "run-1")
OTHER = derive_key(b"another secret of a job", "run-1")
texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20)
requests = st.tuples(texts, texts, texts)


def greeting(client: str = "a", server: str = "b", one: bytes = b"1" * 32, two: bytes = b"2" * 32) -> Handshake:
    return Handshake(client, server, one, two)


@given(st.lists(requests, min_size=1, max_size=5))
def test_what_was_signed_is_accepted_in_its_order(wanted: list[tuple[str, str, str]]) -> None:
    client, server = greeting().session(KEY), greeting().session(KEY)
    for each in wanted:
        assert server.is_signed(client.sign(*each), *each)


@given(requests, requests)
def test_other_requests_need_other_macs(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    mac = greeting().session(KEY).sign(*one)
    assert greeting().session(KEY).is_signed(mac, *other) == (one == other)


def test_a_request_cannot_be_sent_again() -> None:
    client, server = greeting().session(KEY), greeting().session(KEY)
    mac = client.sign("/1/x", "bytes=0-1", "")
    assert server.is_signed(mac, "/1/x", "bytes=0-1", "")
    assert not server.is_signed(mac, "/1/x", "bytes=0-1", "")


@pytest.mark.parametrize(
    "other",
    [
        greeting(client="c"),
        greeting(server="c"),
        greeting(one=b"3" * 32),
        greeting(two=b"3" * 32),
        greeting(client="ab", server=""),
    ],
)
def test_each_connection_has_a_key_of_its_own(other: Handshake) -> None:
    mac = greeting().session(KEY).sign("/1/x", "bytes=0-1", "")
    assert not other.session(KEY).is_signed(mac, "/1/x", "bytes=0-1", "")
    assert not other.is_server(KEY, greeting().server_proof(KEY))


def test_another_secret_is_noticed() -> None:
    assert greeting().is_server(KEY, greeting().server_proof(KEY))
    assert not greeting().is_server(OTHER, greeting().server_proof(KEY))
    assert not greeting().is_server(KEY, "é")
    mac = greeting().session(OTHER).sign("/1/x", "bytes=0-1", "")
    assert not greeting().session(KEY).is_signed(mac, "/1/x", "bytes=0-1", "")


def test_keys_belong_to_a_job() -> None:
    assert derive_key(b"a secret of the job", "run-2") != KEY
    assert len(KEY) == 32
    with pytest.raises(ValueError, match="at least"):
        derive_key(b"short", "run-1")


def test_stores_have_names_that_tell_nothing() -> None:
    assert origin_id(KEY, "s3://bucket/a") == origin_id(KEY, "s3://bucket/a")
    assert len({origin_id(KEY, "s3://a"), origin_id(KEY, "s3://b"), origin_id(OTHER, "s3://a")}) == 3
