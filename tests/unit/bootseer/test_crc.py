"""The library's function without the library's package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bootseer import crc

RFC_3720 = bytes(32), 0x8A9136AA  # B.4: 32 bytes of zeroes


def test_it_is_the_function_of_the_library() -> None:
    data, expected = RFC_3720
    code = f"""
import sys
from bootseer import crc
found = crc.load()
assert "crc32c" not in sys.modules, "the package was imported"
assert found({data!r}) == {expected}
assert found(memoryview({data!r})[16:], found(bytearray(16))) == {expected}
import crc32c
assert crc32c.crc32c(b"both are there", 7) == found(b"both are there", 7)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "what", ["crc._EXTENSION = 'crc32c._none'", "import crc32c"], ids=["other layout", "there"]
)
def test_else_the_package_is_imported(what: str) -> None:
    data, expected = RFC_3720
    code = f"""
import sys
from bootseer import crc
{what}
assert crc.load()({data!r}) == {expected}
assert "crc32c" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_not_installed() -> None:
    code = """
import sys
sys.modules["crc32c"] = None
from bootseer import crc
from bootseer.errors import ConfigError
try:
    crc.crc32c(b"")
except ConfigError as error:
    sys.exit("pip install" not in str(error))
sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_loaded_once() -> None:
    assert crc.load() is crc.load()
