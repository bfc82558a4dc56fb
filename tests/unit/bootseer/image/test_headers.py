"""Headers and errors of registries, also those that no registry should send."""

from __future__ import annotations

import email.utils
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.http.headers import parse_content_range, parse_length, parse_retry_after
from bootseer.storage.oci.headers import Challenge, error_text, next_page, parse_challenges, parse_uploaded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Basic realm="tests"', [Challenge("basic", {"realm": "tests"})]),
        ("Basic", [Challenge("basic", {})]),
        (
            'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {
                        "realm": "https://auth.docker.io/token",
                        "service": "registry.docker.io",
                        "scope": "repository:a/b:pull,push",
                    },
                )
            ],
        ),
        (
            'bearer  REALM = "x" , error=invalid_token',
            [Challenge("bearer", {"realm": "x", "error": "invalid_token"})],
        ),
        (
            'Negotiate, Basic realm="a, b", Bearer realm="c"',
            [
                Challenge("negotiate", {}),
                Challenge("basic", {"realm": "a, b"}),
                Challenge("bearer", {"realm": "c"}),
            ],
        ),
        (r'Basic realm="say \"hi\""', [Challenge("basic", {"realm": 'say "hi"'})]),
        ("", []),
        ('"', []),
    ],
)
def test_challenges(text: str, expected: list[Challenge]) -> None:
    assert parse_challenges(text) == expected


@given(st.text(max_size=200) | st.text(st.sampled_from('aB=", \\t'), max_size=60))
def test_any_challenge_ends(text: str) -> None:
    for challenge in parse_challenges(text):
        assert challenge.scheme == challenge.scheme.lower()


def test_a_long_challenge_ends() -> None:
    parse_challenges('Basic realm="' + "\\" * 1_000_000)
    parse_challenges("a=" * 1_000_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-9/10", (0, 9, 10)),
        (" bytes 5-9/* ", (5, 9, None)),
        ("bytes */10", None),
        ("bytes 9-5/10", None),
        ("0-9", None),
        ("", None),
        ("bytes 0-9/10, bytes 1-2/3", None),
        ("bytes 0-" + "9" * 30 + "/*", None),
    ],
)
def test_content_ranges(text: str, expected: tuple[int, int, int | None] | None) -> None:
    assert parse_content_range(text) == expected


def test_lengths_and_uploads() -> None:
    assert [parse_length(text) for text in ("0", " 12 ", "", "-1", "1e3", "9" * 30)] == [
        0,
        12,
        None,
        None,
        None,
        None,
    ]
    assert [parse_uploaded(text) for text in ("0-0", "0-9", "bytes=0-9", "", "5-9", "x")] == [0, 10, 10, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7.0), ("0", 0.0), ("99999999", 3600.0), ("", 0.0), ("-1", 0.0), ("soon", 0.0), ("9" * 40, 0.0),
        (email.utils.formatdate(1030, usegmt=True), 30.0), (email.utils.formatdate(970, usegmt=True), 0.0),
    ],
)  # fmt: skip
def test_waits(text: str, expected: float) -> None:
    assert parse_retry_after(text, 1000.0) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('</v2/a/referrers/x?n=2>; rel="next"', "/v2/a/referrers/x?n=2"),
        ("<https://r/x>;rel=next", "https://r/x"),
        ('<a>; rel="prev", <b,c>; title="x"; rel="next"', "b,c"),
        ('<a>; rel="nextest"', ""),
        ("a; rel=next", ""),
        ("", ""),
    ],
)
def test_links(text: str, expected: str) -> None:
    assert next_page(text) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (json.dumps({"errors": [{"code": "DENIED", "message": "no"}]}).encode(), "no (DENIED)"),
        (b'{"errors": [{"code": "A"}, {"message": "b"}]}', "A; b"),
        (b'{"errors": [{"message": "a\\u001b[2Jb\\nc"}]}', "a [2Jb c"),
        (b'{"errors": []}', ""),
        (b'{"errors": 7}', ""),
        (b'{"errors": [7]}', ""),
        (b"<html>", ""),
        (b"\xff", ""),
        (b"[" * 100_000, ""),
    ],
)
def test_words_of_registries(body: bytes, expected: str) -> None:
    assert error_text(body) == expected


def test_words_of_registries_are_cut() -> None:
    assert len(error_text(json.dumps({"errors": [{"message": "x" * 10_000}]}).encode())) < 300
