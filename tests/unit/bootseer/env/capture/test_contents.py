"""What is left out of an environment, and what points out of it."""

from __future__ import annotations

import base64
import hashlib
import json
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.capture.contents import (
    EditablePointer,
    find_pointers,
    holds_secret,
    is_bytecode_of,
    is_lock,
    is_of_record,
    is_special,
    judge_pointers,
    may_hold_secret,
    metadata_kind,
    read_record,
)
from bootseer.env.capture.walk import Entry

KEY = b"-----BEGIN %sPRIVATE KEY-----\nMIIB\n"


def file(size: int = 100, mode: int = stat.S_IFREG | 0o644) -> Entry:
    return Entry(mode, 0, 0, size, 1, 1, 1, 1, 1, b"")


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (b".netrc", b"machine a login b password c"),
        (b"home/.pypirc", b"[pypi]"),
        (b"a/.git-credentials", b"https://a:b@c"),
        (b".docker/config.json", b"{}"),
        (b"pip.conf", b"[global]\nindex-url = https://me:secret@host/simple"),
        (b"pip.ini", b"extra-index-url=https://glpat-abc@host/simple"),
        (b"uv.toml", b'index-url = "https://me:secret@host/simple"'),
        (b".npmrc", b"//host/:_authToken=abc"),
        (b".condarc", b"channels:\n- https://host/t/ab-12345678/channel"),
        (b"src/.git/config", b"[remote]\nurl = https://token@github.com/a/b"),
        (b"keys/id_rsa", KEY % b"RSA "),
        (b"keys/id_ed25519", KEY % b"OPENSSH "),
        (b"keys/name", b"text before\n" + KEY % b""),
        (b"server.pem", b"-----BEGIN CERTIFICATE-----\n" + KEY % b"ENCRYPTED "),
        (b"server.key", KEY % b"EC "),
        (b".ssh/deploy.txt", KEY % b"DSA "),
    ],
)
def test_credentials(path: bytes, data: bytes) -> None:
    assert may_hold_secret(path, file(len(data)))
    assert holds_secret(path, data)


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (b"pip.conf", b"[global]\nindex-url = https://host/simple\nno-cache-dir = true"),
        (b"pip.conf", b"index-url = https://${USER}:${PASSWORD}@host/simple"),
        (b"src/.git/config", b"[remote]\nurl = ssh://git@github.com/a/b"),
        (b"certifi/cacert.pem", b"-----BEGIN CERTIFICATE-----\nMII"),
        (b"id_rsa.pub", b"ssh-rsa AAAA"),
        (b"bin/pip", b"#!/usr/bin/python\nimport sys\nKEY = '-----BEGIN PRIVATE KEY-----'\n"),
        (b"config.json", b"{}"),
        (b"docker/config.json", b"{}"),
    ],
)
def test_no_credentials(path: bytes, data: bytes) -> None:
    assert not (may_hold_secret(path, file(len(data))) and holds_secret(path, data))


@given(st.binary(max_size=40), st.binary(max_size=60))
def test_any_name_and_content_has_an_answer(path: bytes, data: bytes) -> None:
    assert isinstance(holds_secret(path, data), bool)
    find_pointers(path, data)
    read_record(data)


def test_only_small_files_are_looked_into() -> None:
    assert not may_hold_secret(b"id_rsa", file(1 << 20))
    assert not may_hold_secret(b"id_rsa", file(0))
    assert not may_hold_secret(b"id_rsa", file(mode=stat.S_IFLNK | 0o777))
    assert not may_hold_secret(b"package/module.py", file())


def test_what_stands_for_no_data() -> None:
    for kind in (stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK):
        assert is_special(file(mode=kind | 0o600))
    for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        assert not is_special(file(mode=kind | 0o600))


def test_lock_of_an_environment() -> None:
    assert is_lock(b".lock", file(0))
    assert not is_lock(b".lock", file(900))
    assert not is_lock(b"uv.lock", file(0))
    assert not is_lock(b"lib/setuptools/_vendor/.lock", file(0))  # setuptools brings one


def test_file_of_a_distribution_is_no_credential() -> None:
    """moto has a key for its proxy, other packages for their tests: without them they do not work."""
    data = KEY % b"RSA "
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    record = read_record(b"moto/ca.key,sha256=" + digest + b",40\n../../../bin/x,sha256=" + digest + b",40\nR,,\n")
    site = b"lib/python3.11/site-packages"
    assert is_of_record(site + b"/moto/ca.key", data, site, record)
    assert is_of_record(b"bin/x", data, site, record)
    assert is_of_record(b"moto/ca.key", data, b"", record)
    assert not is_of_record(site + b"/moto/ca.key", data + b"x", site, record)
    assert not is_of_record(site + b"/moto/other.key", data, site, record)
    assert not is_of_record(b"other/moto/ca.key", data, site, record)


def test_bytecode_of_what_is_left_out() -> None:
    assert is_bytecode_of(b"a/__pycache__/b.cpython-311.pyc", b"a/b.py")
    assert is_bytecode_of(b"__pycache__/b.cpython-311.opt-1.pyc", b"b.py")
    assert not is_bytecode_of(b"a/__pycache__/bc.cpython-311.pyc", b"a/b.py")
    assert not is_bytecode_of(b"c/__pycache__/b.cpython-311.pyc", b"a/b.py")
    assert not is_bytecode_of(b"a/__pycache__/b.cpython-311.pyc", b"a/b")


SITE = b"lib/python3.11/site-packages/"


@pytest.mark.parametrize(
    ("path", "data", "found"),
    [
        (
            SITE + b"my_pkg-1.0.dist-info/direct_url.json",
            json.dumps({"url": "file:///src/my%20pkg", "dir_info": {"editable": True}}).encode(),
            [EditablePointer("my_pkg", "/src/my pkg")],
        ),
        (
            SITE + b"my_pkg-1.0.dist-info/direct_url.json",
            json.dumps({"url": "file:///src/my", "dir_info": {}}).encode(),
            [],
        ),
        (SITE + b"my_pkg-1.0.dist-info/direct_url.json", b"{broken", []),
        (SITE + b"my_pkg-1.0.dist-info/direct_url.json", b'["a"]', []),
        (SITE + b"my_pkg-1.0.dist-info/direct_url.json", b"[" * 100_000, []),
        (SITE + b"direct_url.json", b'{"url": "file:///a", "dir_info": {"editable": true}}', []),
        (SITE + b"my-pkg.egg-link", b"/src/my\n.", [EditablePointer("my-pkg", "/src/my")]),
        (SITE + b"__editable__.my_pkg-1.0.pth", b"/src/my/lib\n", [EditablePointer("my_pkg", "/src/my/lib")]),
        (SITE + b"__editable__.my_pkg-1.0.pth", b"import __editable___my_pkg_1_0_finder; ...install()", []),
        (SITE + b"easy-install.pth", b"/src/a\n./b\n", [EditablePointer("easy-install.pth", "/src/a")]),
        (SITE + b"distutils-precedence.pth", b"/src/a\n", []),
        (
            SITE + b"__editable___my_pkg_1_0_finder.py",
            (
                b"import sys\nMAPPING: dict[str, str] = {'my': '/src/my/my', 'rel': 'x'}\n"
                b"NAMESPACES: dict[str, list[str]] = {'n': ['/src/n']}\nx = 1\n"
            ),
            [EditablePointer("my_pkg_1_0", "/src/my/my"), EditablePointer("my_pkg_1_0", "/src/n")],
        ),
        (SITE + b"__editable___my_finder.py", b"MAPPING = {open('/etc/passwd')}\n", []),
        (SITE + b"module.py", b"MAPPING = {'a': '/b'}\n", []),
    ],
)
def test_packages_in_place(path: bytes, data: bytes, found: list[EditablePointer]) -> None:
    assert find_pointers(path, data) == found
    assert bool(metadata_kind(path)) or not found


def test_where_a_source_directory_may_be() -> None:
    pointers = [
        EditablePointer("inside", "/venv/src/a"),
        EditablePointer("declared", "/job/b/src"),
        EditablePointer("neither", "/job/c"),
        EditablePointer("neither", "/job/c"),
        EditablePointer("beside", "/venvs/x"),
    ]
    found = judge_pointers(pointers, ["/venv"], ["/job/b", "/job/unused"])
    assert found.required == ["/job/b"]
    assert found.refused == [EditablePointer("neither", "/job/c"), EditablePointer("beside", "/venvs/x")]
    assert judge_pointers([EditablePointer("out", "/venv/../job")], ["/venv"], []).refused
    assert not judge_pointers([EditablePointer("a", "/a")], ["/"], []).refused
