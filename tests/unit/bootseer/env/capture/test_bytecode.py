"""When bytecode is believed, and where it lies: as Python itself does it."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import stat
import sys
from pathlib import Path

import pytest

from bootseer.env.capture import bytecode
from bootseer.env.capture.walk import Entry, walk

MAGIC = importlib.util.MAGIC_NUMBER
TAG = os.fsencode(sys.implementation.cache_tag or "")


def entry(size: int = 10, mtime_ns: int = 5 * 10**9 + 7) -> Entry:
    return Entry(stat.S_IFREG | 0o644, 0, 0, size, mtime_ns, 1, 1, 1, 1, b"")


@pytest.mark.parametrize("path", ["a.py", "a/b.py", "a.b/c.d.py"])
def test_where_it_lies(path: str) -> None:
    assert os.fsdecode(bytecode.bytecode_path(path.encode(), TAG)) == importlib.util.cache_from_source(path)


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_what_python_wrote_is_valid(tmp_path: Path, mode: py_compile.PycInvalidationMode) -> None:
    (tmp_path / "a.py").write_text("X = 1\n")
    made = py_compile.compile(os.fspath(tmp_path / "a.py"), doraise=True, invalidation_mode=mode)
    assert made is not None
    assert bytecode.is_valid(Path(made).read_bytes()[:16], MAGIC, walk(os.fspath(tmp_path))[b"a.py"])


def test_what_is_not_trusted() -> None:
    header = MAGIC + bytes(4) + (5).to_bytes(4, "little") + (10).to_bytes(4, "little")
    assert bytecode.is_valid(header, MAGIC, entry())
    assert bytecode.is_valid(header, MAGIC, entry(10 + 2**32, (5 + 2**32) * 10**9))  # 32 bits, as in Python
    assert not bytecode.is_valid(header, MAGIC, entry(11))
    assert not bytecode.is_valid(header, MAGIC, entry(mtime_ns=6 * 10**9))
    assert not bytecode.is_valid(header, b"\0\0\r\n", entry())
    assert not bytecode.is_valid(header[:15], MAGIC, entry())
    assert not bytecode.is_valid(MAGIC + b"\2\0\0\0" + header[8:], MAGIC, entry())  # of no version that there is


def test_what_is_compiled() -> None:
    file, directory = entry(), entry()._replace(mode=stat.S_IFDIR | 0o755)
    link = entry()._replace(mode=stat.S_IFLNK | 0o777, target=b"a.py")
    after = {
        b"a.py": file,
        b"bin/tool.py": file,
        b"folder.py": directory,
        b"link.py": link,
        b"lib/b.py": file,
        b"c": file,
    }
    assert bytecode.sources_of(list(after), after) == [b"a.py", b"lib/b.py"]


def test_interpreter_that_cannot_be_asked(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no json\n")
    broken.chmod(0o755)
    assert bytecode.probe(os.fspath(broken)) is None
    assert bytecode.probe(os.fspath(tmp_path / "nowhere")) is None
    assert bytecode.probe(sys.executable) == bytecode.BytecodeFormat(sys.executable, TAG, MAGIC)
