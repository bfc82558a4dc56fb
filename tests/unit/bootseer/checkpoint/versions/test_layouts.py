"""What frameworks save, as it is and cut at each of its files: the newest whole save is taken, never a torn one.

tests/layouts/make.py has made the fixtures by running the frameworks. Each save is cut at each of its files: the
file is missing, empty, cut to its first half, or all zeros.
"""

from __future__ import annotations

import os
import re
import tarfile
import tomllib
import uuid
from functools import cache
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.versions.resolve import NoCompleteCheckpoint, Pinned, resolve
from bootseer.errors import BootseerError
from bootseer.storage.memory import MemoryStore, forget

DIRECTORY = os.fspath(Path(__file__).parents[4] / "layouts")
NAMES = sorted(name.removesuffix(".tar.xz") for name in os.listdir(DIRECTORY) if name.endswith(".tar.xz"))
CUTS = ("missing", "empty", "half", "zeros")
Files = dict[str, bytes]


@cache
def table() -> dict[str, dict[str, object]]:
    with open(os.path.join(DIRECTORY, "table.toml"), "rb") as file:
        return tomllib.load(file)


@cache
def read(name: str) -> Files:
    """In the order in which the framework has written them."""
    with tarfile.open(os.path.join(DIRECTORY, f"{name}.tar.xz")) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def cut(files: Files, name: str, how: str) -> Files:
    data = files[name]
    changed = {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}
    return {
        each: changed.get(how, b"") if each == name else files[each]
        for each in files
        if how != "missing" or each != name
    }


def taken(files: Files, path: str = "run") -> tuple[str, list[str], Pinned | None]:
    """The version that is taken of a folder with these files, and lines about newer ones; "" for none."""
    place, lines = uuid.uuid4().hex, list[str]()

    async def look() -> Pinned:
        store = MemoryStore(place)
        for name, data in files.items():
            await store.publish(f"{path}/{name}", data)
        return await resolve(store, path, on_passed=lines.append)

    try:
        pinned = aio.run_sync(look())
        return pinned.version or ".", lines, pinned
    except NoCompleteCheckpoint:
        return "", lines, None
    except BootseerError as error:
        return f"{type(error).__name__}: {error}", lines, None
    finally:
        forget(place)


def wrong(name: str) -> list[str]:
    """What is not as it should be, of one layout."""
    row, files = table()[name], read(name)
    newest, older, free = str(row["newest"]), str(row["older"]), list(row.get("free", ()))  # type: ignore[call-overload]
    version, lines, pinned = taken(files)
    if version != newest or pinned is None or lines:
        return [f"whole: {version} is taken, not {newest}: {lines}"]
    own = [each for each in files if each == newest or each.startswith(f"{newest}/")]
    found = [] if len(pinned.files) == len(own) else [f"whole: {len(pinned.files)} files, not {len(own)}"]
    for each in own:
        for how in CUTS:
            does_not_count = any(
                re.fullmatch(pattern, f"{how} {each[len(newest) + 1 :] or each}") for pattern in free
            )
            torn = cut(files, each, how)
            version, lines, _ = taken(torn)
            if does_not_count:
                found += [f"{each} {how}: {version} is taken, and it does not count"] if version != newest else []
            elif version != older or (not lines and not (len(own) == 1 and how == "missing")):
                found.append(f"{each} {how}: {version} is taken, not {older}: {lines}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_newest_whole_save_is_taken(name: str) -> None:
    assert wrong(name) == []


def test_each_layout_has_a_row() -> None:
    assert sorted(table()) == NAMES
    assert len(NAMES) >= 60
