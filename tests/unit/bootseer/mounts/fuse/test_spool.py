"""Files that are being written, in memory and on the disk."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from bootseer.mounts.fuse.spool import Spool

ROOM = 4096
WRITES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2000), st.binary(max_size=2000)),
        st.tuples(st.integers(0, 3000), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(WRITES, WRITES)
def test_any_writes_give_what_a_file_has(tmp_path_factory, first: list, second: list) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool(ROOM, os.fspath(directory))
    for writes in (first, second):
        file, plain = spool.create(), bytearray()
        for offset, data in writes:
            if data is None:
                file.truncate(offset)
                plain = plain[:offset].ljust(offset, b"\0")
            elif data:
                file.write(data, offset)
                plain = plain.ljust(offset + len(data), b"\0")
                plain[offset : offset + len(data)] = data
        target = bytearray(len(plain) + 10)
        assert file.size == len(plain)
        assert file.read_into(memoryview(target), 0) == len(plain)
        assert target[: len(plain)] == plain
        assert spool._used_bytes <= ROOM
        if writes is second:
            file.close()
    assert os.listdir(directory) == []


def test_room_is_given_back(tmp_path) -> None:
    spool = Spool(ROOM, os.fspath(tmp_path))
    first = spool.create()
    first.write(b"a" * ROOM, 0)
    second = spool.create()
    second.write(b"b" * 10, 0)
    assert os.readlink(f"/proc/self/fd/{first.fd}").startswith("/memfd:")
    assert os.readlink(f"/proc/self/fd/{second.fd}").startswith(os.fspath(tmp_path))
    first.close()
    first.close()
    third = spool.create()
    third.write(b"c" * ROOM, 0)
    assert os.readlink(f"/proc/self/fd/{third.fd}").startswith("/memfd:")
    with pytest.raises(ValueError, match="closed"):
        first.read_into(memoryview(bytearray(1)), 0)
    second.close()
    third.close()


def test_directory_that_is_missing() -> None:
    with pytest.raises(ConfigError, match="--spool"):
        Spool(1, "/no/such/folder")
