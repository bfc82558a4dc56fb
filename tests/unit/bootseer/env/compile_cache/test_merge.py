"""The next generation of compile caches: unions, conflicts, limits, and what stands in the document."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.compile_cache.document import (
    MAX_FILES,
    CachedFile,
    CacheGeneration,
    check,
    decode,
    encode,
    name_of,
    number_of,
)
from bootseer.env.compile_cache.merge import (
    USE_STEP_S,
    FoundFile,
    MergedGeneration,
    SeedState,
    merge,
    unit_of_path,
)
from bootseer.errors import FormatVersion, IntegrityError, Untrusted

KEY = "ab" * 32
NOW_S = 1_800_000_000


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def found(path: str, text: str = "a", *, size: int = 10, mtime_ns: int = 5, is_used: bool = True) -> FoundFile:
    return FoundFile(path, size, mtime_ns, digest(text), is_used, f"/here/{path}")


def generation(merged: MergedGeneration, number: int) -> CacheGeneration:
    return CacheGeneration(key=KEY, number=number, tree="cd" * 32, index_bytes=1, made_s=NOW_S, files=merged.files)


def first(*files: FoundFile, now_s: int = NOW_S) -> CacheGeneration:
    return generation(merge(None, files, now_s, number=1), 1)


def paths(merged: MergedGeneration | CacheGeneration) -> list[str]:
    return [fact.path for fact in merged.files]


# ---- union and conflict ------------------------------------------------------------------------------------


def test_different_models_of_one_stack_are_in_one_cache() -> None:
    last = first(found("inductor/aa/cx.py"))
    merged = merge(last, [found("inductor/bb/cy.py")], NOW_S, number=2)
    assert paths(merged) == ["inductor/aa/cx.py", "inductor/bb/cy.py"]
    assert merged.ours == {"inductor/bb/cy.py"}
    assert (merged.added, merged.is_worth_it) == (1, True)
    check(generation(merged, 2), "here")


def test_the_same_bytes_from_another_node_are_nothing_new() -> None:
    last = first(found("inductor/aa/cx.py", mtime_ns=5))
    merged = merge(last, [found("inductor/aa/cx.py", mtime_ns=99)], NOW_S, number=2)
    assert (merged.ours, merged.added, merged.is_worth_it) == (frozenset(), 0, False)
    assert merged.files[0].mtime_ns == 5


@pytest.mark.parametrize(("mtime_ns", "wins"), [(4, False), (5, False), (6, True)])
def test_of_two_files_of_a_name_the_newer_stays(mtime_ns: int, wins: bool) -> None:
    last = first(found("inductor/cache/x", "old", mtime_ns=5))
    merged = merge(last, [found("inductor/cache/x", "new", mtime_ns=mtime_ns)], NOW_S, number=2)
    assert merged.files[0].sha256 == digest("new" if wins else "old")
    assert merged.is_worth_it is wins


def test_builds_of_an_extension_are_never_mixed() -> None:
    place = "extensions/" + "0" * 16 + "/fast/"
    last = first(found(place + "a.so", "1", mtime_ns=5), found(place + "old.o", "1", mtime_ns=4))
    newer = [found(place + "a.so", "2", mtime_ns=8), found(place + "new.o", "2", mtime_ns=7)]
    merged = merge(last, newer, NOW_S, number=2)
    assert paths(merged) == [place + "a.so", place + "new.o"]
    assert len(merged.ours) == 2
    older = [found(place + "a.so", "3", mtime_ns=3)]
    assert paths(merge(last, older, NOW_S, number=2)) == paths(last)
    elsewhere = found("extensions/" + "1" * 16 + "/fast/a.so", "4")
    assert len(merge(last, [elsewhere], NOW_S, number=2).files) == 3


def test_a_use_is_written_down_when_the_last_one_is_long_ago() -> None:
    last = first(found("jax/a-cache"))
    again = [found("jax/a-cache")]
    assert not merge(last, again, NOW_S + USE_STEP_S - 1, number=2).is_worth_it
    merged = merge(last, again, NOW_S + USE_STEP_S, number=2)
    assert merged.is_worth_it
    assert (merged.files[0].since, merged.files[0].used_in, merged.files[0].used_s) == (1, 2, NOW_S + USE_STEP_S)
    unused = [found("jax/a-cache", is_used=False)]
    assert not merge(last, unused, NOW_S + USE_STEP_S, number=2).is_worth_it


def test_nothing_makes_no_generation() -> None:
    assert not merge(None, [], NOW_S, number=1).is_worth_it


# ---- limits ------------------------------------------------------------------------------------------------


def test_what_was_not_of_use_for_the_longest_time_goes_first() -> None:
    last = first(found("jax/a-cache", size=40), found("jax/b-cache", size=40))
    merged = merge(
        last, [found("jax/a-cache", size=40), found("jax/c-cache", size=40)], NOW_S, number=2, limit_bytes=100
    )
    assert paths(merged) == ["jax/a-cache", "jax/c-cache"]
    assert merged.evicted == 1
    assert merged.ours == {"jax/c-cache"}


def test_what_went_does_not_come_back_because_a_node_still_has_it() -> None:
    last = first(found("jax/a-cache"))
    place = "extensions/" + "0" * 16 + "/fast/"
    there = [
        found(path, is_used=False) for path in ("jax/gone-cache", place + "a.so", place + "a.o", "cuda/index")
    ]
    merged = merge(last, there, NOW_S, number=2)
    assert (paths(merged), merged.is_worth_it) == (["jax/a-cache"], False)
    assert "jax/gone-cache" in paths(merge(last, [found("jax/gone-cache")], NOW_S, number=2))


def test_what_is_used_together_goes_together() -> None:
    last = first(found("triton/K/a.cubin", size=50), found("triton/K/a.json", size=1))
    merged = merge(last, [found("triton/L/b.cubin", size=50)], NOW_S, number=2, limit_bytes=60)
    assert paths(merged) == ["triton/L/b.cubin"]


def test_the_limit_holds_over_fifty_starts_and_the_working_set_stays() -> None:
    """By use, fewer files of the models that are started most are made again than by age alone."""
    by_use, by_age = fifty_starts(shows_reads=True), fifty_starts(shows_reads=False)
    assert by_use * 2 < by_age


def fifty_starts(*, shows_reads: bool) -> int:
    """Ten models, three of them started most of the time; each has kernels of its own and some of all.

    How many files of those three were made again. `shows_reads`: whether the file system tells what is read.
    """
    limit, chance = 60_000, random.Random(3)
    last: CacheGeneration | None = None
    made_again = 0
    for number in range(1, 51):
        model = chance.choice([0, 1, 2] * 5 + list(range(10)))
        needed = [f"inductor/{model:02}/c{kernel}.py" for kernel in range(8)]
        needed += [f"inductor/ff/c{kernel}.py" for kernel in range(4)]
        there = set(paths(last)) if last else set()
        if model in (0, 1, 2) and number > 10:
            made_again += len(set(needed) - there)
        files = [
            found(path, size=1000, is_used=path in needed and (shows_reads or path not in there))
            for path in sorted(there | set(needed))
        ]
        merged = merge(last, files, NOW_S + number * 600, number=number, limit_bytes=limit)
        assert merged.size <= limit
        if shows_reads:
            assert set(needed) <= set(paths(merged))
        if merged.is_worth_it:
            last = generation(merged, number)
            check(last, "here")
    return made_again


FILES = st.lists(
    st.builds(
        found,
        st.sampled_from(
            [
                f"{kind}/{unit}/{name}"
                for kind in ("inductor", "triton", "cuda", "own")
                for unit in "pq"
                for name in ("a.so", "b")
            ]
            + [f"extensions/{'0' * 16}/{unit}/{name}" for unit in "pq" for name in ("a.so", "b")]
        ),
        st.sampled_from("xy"),
        size=st.integers(0, 100),
        mtime_ns=st.integers(0, 3),
        is_used=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: each.path,
)


@given(st.lists(st.tuples(FILES, st.integers(0, 400), st.integers(1, 20)), max_size=6))
def test_whatever_starts_bring_the_next_generation_can_be_read_and_is_within_limits(
    starts: list[tuple[list[FoundFile], int, int]],
) -> None:
    last: CacheGeneration | None = None
    for number, (files, limit_bytes, max_files) in enumerate(starts, 1):
        merged = merge(last, files, NOW_S + number, number=number, limit_bytes=limit_bytes, max_files=max_files)
        assert merged.size <= limit_bytes
        assert len(merged.files) <= max_files
        old = {fact.path: fact for fact in last.files} if last else {}
        ours = {each.path: each for each in files}
        units: dict[str, set[bool]] = {}
        for fact in merged.files:
            if fact.path in merged.ours:
                assert fact.sha256 == ours[fact.path].sha256
            else:
                assert (fact.sha256, fact.since) == (old[fact.path].sha256, old[fact.path].since)
            units.setdefault(unit_of_path(fact.path), set()).add(fact.path in merged.ours)
        for unit, sides in units.items():
            assert len(sides) == 1 or not unit.startswith(("extensions/", "cuda/"))
        last = generation(merged, number)
        assert decode(encode(last), "here", KEY, number) == last


# ---- the document ------------------------------------------------------------------------------------------

GOOD = first(found("inductor/aa/cx.py"), found("triton/K/a.cubin"))


def test_a_generation_is_read_as_it_was_written() -> None:
    assert decode(encode(GOOD), "here", KEY, 1) == GOOD


def test_another_key_or_number_is_refused() -> None:
    with pytest.raises(Untrusted, match="another key"):
        decode(encode(GOOD), "here", "ef" * 32, 1)
    with pytest.raises(Untrusted, match="under another name"):
        decode(encode(GOOD), "here", KEY, 2)


def changed(**fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(GOOD), **fields})


def fact(**fields: Any) -> list[Any]:
    table = {"path": "jax/a", "size": 1, "mtime_ns": 1, "sha256": "ab" * 32, "since": 1, "used_in": 1, "used_s": 1}
    return list({**table, **fields}.values())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[]",
        changed(key="x"),
        changed(tree="../" + "a" * 61),
        changed(number=0),
        changed(number=1_000_000),
        changed(index_bytes=0),
        changed(index_bytes=1 << 40),
        changed(more=1),
        changed(files=[fact(path="../a")]),
        changed(files=[fact(path="jax/../../a")]),
        changed(files=[fact(path="/etc/a")]),
        changed(files=[fact(path="jax//a")]),
        changed(files=[fact(path="jax")]),
        changed(files=[fact(path="jax/\x00")]),
        changed(files=[fact(path="jax/" + "a" * 300)]),
        changed(files=[fact(), fact()]),
        changed(files=[fact(path="jax/b"), fact(path="jax/a")]),
        changed(files=[fact(size=-1)]),
        changed(files=[fact(size=1 << 60)]),
        changed(files=[fact(sha256="A" * 64)]),
        changed(files=[fact(since=2, used_in=2)]),
        changed(files=[fact(since=0)]),
        changed(files=[fact(used_s=-1)]),
        changed(files=[fact(mtime_ns=1 << 63)]),
        changed(files=[fact(path=f"jax/{number:06}") for number in range(MAX_FILES + 1)]),
        b"[" * 100_000,
    ],
)
def test_anything_else_is_one_error(payload: bytes) -> None:
    with pytest.raises(IntegrityError, match="here: "):
        decode(payload, "here", KEY, 1)


def test_a_newer_format_says_so() -> None:
    with pytest.raises(FormatVersion, match="newer"):
        decode(changed(format="bootseer-caches/2"), "here", KEY, 1)


@given(st.integers(1, 999_999))
def test_names_of_generations(number: int) -> None:
    assert number_of(name_of(number)) == number


@pytest.mark.parametrize("name", ["cache-1.json", "cache-0000001.json", "cache-000001.json.tmp", "newest.json"])
def test_other_names_are_none(name: str) -> None:
    assert number_of(name) is None


def test_facts_have_the_fields_that_the_format_names() -> None:
    assert [field.name for field in msgspec.structs.fields(CachedFile)] == [
        *("path", "size", "mtime_ns", "sha256", "since", "used_in", "used_s")
    ]


# ---- what other nodes made at the same time ----------------------------------------------------------------

CASES = [
    ("inductor/aa/cx.py", True),
    ("triton/ABC/k.cubin", True),
    ("jax/k-cache", True),
    ("cuda/index", True),
    ("extensions/" + "0" * 16 + "/fast/fast.so", True),
    ("numba/x.nbi", False),  # an index: what it says is not in its name
    ("mine/tuned.bin", False),
]


@pytest.mark.parametrize(("path", "is_kept"), CASES)
def test_what_came_since_the_seed_is_as_good_as_ones_own(path: str, is_kept: bool) -> None:
    last = first(found(path, "theirs", mtime_ns=50))
    merged = merge(last, [found(path, "mine", mtime_ns=60)], NOW_S + 1, number=2, given=SeedState(0, 10))
    assert merged.files[0].sha256 == digest("theirs" if is_kept else "mine")
    assert merged.is_worth_it is not is_kept
    assert merged.files[0].used_in == 2, "it is of use"


@pytest.mark.parametrize(("path", "is_kept"), CASES)
def test_what_was_here_before_the_seed_does_not_replace_what_is_there(path: str, is_kept: bool) -> None:
    last = first(found(path, "theirs", mtime_ns=5))
    merged = merge(last, [found(path, "mine", mtime_ns=8)], NOW_S, number=2, given=SeedState(1, 10))
    assert merged.is_worth_it is not is_kept


@pytest.mark.parametrize("path", [path for path, _ in CASES])
def test_what_was_seeded_and_made_again_is_replaced(path: str) -> None:
    last = first(found(path, "of no use", mtime_ns=5))
    merged = merge(last, [found(path, "mine", mtime_ns=20)], NOW_S, number=2, given=SeedState(1, 10))
    assert merged.files[0].sha256 == digest("mine")
    assert merged.is_worth_it
