"""Which files of compile caches are kept, what belongs together, and what is whole."""

from __future__ import annotations

import json
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.compile_cache.kinds import (
    KINDS,
    NCCL,
    CacheKind,
    is_built,
    is_complete,
    is_group,
    is_kept,
    is_path,
    is_temporary,
    lock_of,
    to_canonical_group,
    to_local_group,
    unit_of,
)

BY_NAME = {kind.name: kind for kind in KINDS}
INDUCTOR, TRITON, EXTENSIONS = BY_NAME["inductor"], BY_NAME["triton"], BY_NAME["extensions"]


def elf(size: int, sections: int = 3) -> bytes:
    """An object whose linker wrote the table of sections at its end."""
    head = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 3, 62, 1, 0, 64, size - 64 * sections, 0, 64, 56, 1, 64, sections, 1),
    )
    return head + bytes(size - len(head))


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (INDUCTOR, "locks/cabc.lock"),
        (INDUCTOR, "ab/.12.139.tmp"),
        (INDUCTOR, "gcc/bin/g++"),
        (INDUCTOR, "dynamo/code_state_x.pkl.tmp"),
        (INDUCTOR, "dynamo/code_state_x.pkl.lock"),
        (TRITON, "ABC/tmp.pid_12_uuid/kernel.cubin"),
        (TRITON, "tmp.12/kernel.cubin"),
        (EXTENSIONS, "fast/lock"),
        (BY_NAME["numba"], "m_1/mod.f-1.py311.nbi.tmp.12ab"),
        (INDUCTOR, "ab/.nfs0001"),
        (INDUCTOR, "ab/new\nline.py"),
    ],
)
def test_what_is_being_written_or_nobody_needs_is_not_kept(kind: CacheKind, path: str) -> None:
    assert not is_kept(kind, path)


@pytest.mark.parametrize(
    ("kind", "path", "unit"),
    [
        (INDUCTOR, "ab/cabc.main.so", "ab/cabc"),
        (INDUCTOR, "ab/cabc.main.cpp", "ab/cabc"),
        (INDUCTOR, "fxgraph/ab/fkey/hash", "fxgraph/ab/fkey/hash"),
        (TRITON, "ABC/kernel.cubin", "ABC"),
        (TRITON, "ABC/__grp__kernel.json", "ABC"),
        (EXTENSIONS, "fast/build.ninja", "fast"),
        (BY_NAME["cuda"], "1/2/abc", ""),
        (BY_NAME["cuda"], "index", ""),
        (BY_NAME["jax"], "jit_f-12ab-cache", "jit_f-12ab"),
        (BY_NAME["jax"], "jit_f-12ab-atime", "jit_f-12ab"),
        (EXTENSIONS, "fast/.ninja_log", "fast"),
    ],
)
def test_what_is_used_together(kind: CacheKind, path: str, unit: str) -> None:
    assert is_kept(kind, path)
    assert unit_of(kind, path) == unit


def test_a_kind_has_a_directory_and_a_variable_of_its_own() -> None:
    assert len({kind.name for kind in (*KINDS, NCCL)}) == len(KINDS) + 1
    assert len({kind.variable for kind in KINDS}) == len(KINDS)
    assert not any(is_temporary(kind.name) for kind in (*KINDS, NCCL))


def test_the_lock_of_a_kernel_has_the_name_that_torch_gives_it() -> None:
    assert lock_of(INDUCTOR, "ab/cabc.main.so") == "locks/cabc.lock"
    assert lock_of(TRITON, "ABC/kernel.cubin") == ""


@given(st.text(max_size=40))
def test_no_path_leads_out(path: str) -> None:
    if is_path(path):
        assert os.path.normpath(os.path.join("/a/b", path)) == f"/a/b/{path}"
        json.dumps(path).encode()  # can be written down


@given(st.integers(300, 5000), st.data())
def test_an_object_that_ends_too_early_is_not_whole(size: int, data: st.DataObject) -> None:
    whole = elf(size)
    assert is_complete("a/b.so", size, whole[:64], None, whole[-64:])
    cut = data.draw(st.integers(0, size - 1))
    assert not is_complete("a/b.so", cut, whole[:cut][:64], None, whole[:cut][-64:])


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("a/b.so", bytes(4096)),  # room that was made for what never came
        ("a/b.so", b"#include"),
        ("a/b.py", b""),
        ("a/b.json", b'{"a": 1'),
        ("t.xml", b"<system><cpu"),
    ],
)
def test_halves_are_not_whole(path: str, data: bytes) -> None:
    assert not is_complete(path, len(data), data[:64], data, data[-64:])


@pytest.mark.parametrize(("path", "data"), [("a.json", b'{"a": 1}'), ("x.xml", b"<a></a>\n"), ("a.py", b"x = 1")])
def test_whole_files_are_whole(path: str, data: bytes) -> None:
    assert is_complete(path, len(data), data[:64], data, data[-64:])


def test_an_extension_is_built_when_its_library_is_the_newest() -> None:
    built = {"main.cpp": 1, "main.o": 2, "fast.so": 3, "build.ninja": 9, ".ninja_log": 9, ".ninja_deps": 9}
    assert is_built(built)
    assert not is_built({**built, "main.o": 4})
    assert not is_built({name: at for name, at in built.items() if name != "fast.so"})
    assert not is_built({name: at for name, at in built.items() if name != "build.ninja"})


# ---- triton's groups ---------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.text("abc._", min_size=1, max_size=9).filter(is_path),
        st.sampled_from(["/a/b", "/c", "/home/x/y z"]),
        max_size=4,
    )
)
def test_a_group_is_the_same_bytes_wherever_it_was_made(names: dict[str, str]) -> None:
    there = json.dumps(
        {"child_paths": {name: f"{directory}/{name}" for name, directory in names.items()}}
    ).encode()
    kept = to_canonical_group(there)
    assert kept is not None
    here = to_local_group(kept, "/n/o")
    assert here is not None
    assert json.loads(here) == {"child_paths": {name: f"/n/o/{name}" for name in names}}
    assert to_canonical_group(here) == kept


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"child_paths": ["a"]}',
        b'{"child_paths": {"a": "/b/.."}}',
        b'{"child_paths": {"a": 1}}',
    ],
)
def test_what_is_no_group_is_not_kept(data: bytes) -> None:
    assert to_canonical_group(data) is None
    assert to_local_group(data, "/a") is None


def test_a_group_is_known_by_its_name() -> None:
    assert is_group("ABC/__grp__kernel.json")
    assert not is_group("ABC/kernel.json")


def test_how_inductor_compiles_is_left_to_it() -> None:
    """What a variable of torch's turns off is missing at the first compilation."""
    assert [name for kind in KINDS for name, _ in kind.also if name.startswith(("TORCH", "PYTORCH"))] == []
