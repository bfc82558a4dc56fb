"""Names that stay in the store, URLs without their secrets."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import StorageError
from bootseer.storage.paths import check_path, is_chained, join, redact, scheme_of
from tests.testing.store_suite import BAD_PATHS, NAMES

parts = st.sampled_from(["a", "..", ".", "", "b c", "%2e%2e", "~", "...", "\\", "\0", "ü", "-", "C:", "a\n"])


@given(st.lists(parts, max_size=6).map("/".join) | st.text(max_size=20))
def test_what_is_accepted_stays_below_the_root(path: str) -> None:
    try:
        assert check_path("file:///root", path) == path
    except StorageError:
        return
    full = os.path.normpath(os.path.join("/root/folder", path))
    assert full == f"/root/folder/{path}"
    assert not set("\0\\\r\n") & set(path)


@pytest.mark.parametrize("path", BAD_PATHS)
def test_bad_paths(path: str) -> None:
    with pytest.raises(StorageError) as caught:
        check_path("s3://bucket", path)
    assert "s3://bucket" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_good_names(name: str) -> None:
    assert check_path("s3://bucket", f"folder/{name}") == f"folder/{name}"


def test_only_a_directory_may_be_the_root() -> None:
    assert check_path("u", "", is_folder=True) == ""
    with pytest.raises(StorageError):
        check_path("u", "/", is_folder=True)
    assert join("", "a") == "a"
    assert join("a/b", "c") == "a/b/c"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("/plain/path?with=query", "/plain/path?with=query"),
        ("http://host:81/a/b", "http://host:81/a/b"),
        ("http://user:word@host/a", "http://user:***@host/a"),
        ("http://user:w@rd@host/a", "http://user:***@host/a"),
        ("https://token@host/a", "https://***@host/a"),
        ("https://host/a?X-Amz-Signature=abc&n=1#part", "https://host/a?X-Amz-Signature=***&n=***"),
        ("https://host/a?abc", "https://host/a?abc=***"),
        ("s3://bucket/a%20b", "s3://bucket/a%20b"),
        ("zip://in.bin::https://u:word@host/x.zip?s=1", "zip://in.bin::https://u:***@host/x.zip?s=***"),
        ("odd:///tmp/x", "odd:///tmp/x"),
        ("http://[::1]:81/a", "http://[::1]:81/a"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert "word" not in redact(url)


@given(st.text(max_size=30))
def test_redact_takes_anything(text: str) -> None:
    for url in (text, f"http://{text}", f"zip://{text}::http://{text}"):
        redact(url)
    assert "hunter2" not in redact(f"http://u:hunter2@host/{text}")
    assert "hunter2" not in redact(f"http://host/p?{text.replace('#', '')}=hunter2")


@pytest.mark.parametrize("query", ["::=hunter2", "a::b://c=hunter2", "x=1::hunter2"])
def test_a_query_that_looks_like_a_chain_is_hidden(query: str) -> None:
    assert "hunter2" not in redact(f"zip://a::http://host/p?{query}")


def test_schemes() -> None:
    assert scheme_of("/a/b") == scheme_of("a::b") * 0 == ""
    assert scheme_of("./s3://x") == ""
    assert scheme_of("S3://bucket/x") == "s3"
    assert scheme_of("s3+x://bucket") == "s3+x"
    assert is_chained("zip://a::s3://b/c")
    assert is_chained("simplecache::s3://b/c")
    assert not is_chained("/folder/a::b")
    assert not is_chained("http://[::1]:80/a")
