"""What is put beside the traces of a store, for those who cannot list it: all of them in one."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bootseer import aio
from bootseer.blocks.trace import ANY_WORKLOAD, KEPT_RUNS, Trace, decode, encode, merge, recording_name
from bootseer.mounts.tree_daemon.traces import (
    ALL_TRACES,
    PAYLOAD_TYPE,
    Traces,
    list_stored,
    merge_all,
    publish_traces,
    read_stored,
    renew_all,
)
from bootseer.storage import open_store
from bootseer.storage.memory import forget
from bootseer.storage.small_files import read_small
from bootseer.trust import KeyDirectory, PublicKey, SigningKey, Trust, TrustedKey, parse
from tests.testing.faulty_store import FaultyStore

TREE = "ab" * 32
COUNT = 50
STORE = "memory://test-tree-traces"


def run_with_store(run: Callable[[], Coroutine[object, object, None]]) -> None:
    """On aio's loop; what it has put into STORE goes."""
    try:
        aio.run_sync(run())
    finally:
        aio.close()
        forget(STORE.removeprefix("memory://"))


@st.composite
def stored(draw: st.DrawFn) -> list[Trace]:
    """As a store has them: each of its own workload, some of recordings with names."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        blocks = draw(st.lists(st.integers(0, COUNT - 1), unique=True, max_size=20))
        runs = draw(st.integers(1, 40))
        named = draw(st.integers(0, runs))
        trace = Trace(
            tree=TREE,
            workload=f"{number:016x}",
            runs=runs,
            blocks=blocks,
            seen=[draw(st.integers(1, runs)) for _ in blocks],
            first_ms=[draw(st.integers(0, 10_000)) for _ in blocks],
            recordings=[recording_name(number, each) for each in range(named)],
        )
        found.append(merge([trace]))
    return found


@given(stored(), st.randoms())
def test_what_is_hot_in_one_is_hot_in_all_together(some: list[Trace], chance: object) -> None:
    whole = merge_all(some)
    assert decode(encode(whole), TREE, COUNT, "here") == whole and whole.workload == ANY_WORKLOAD
    hot = {number for trace in some for number in trace.hot()}
    assert hot <= set(whole.hot())
    runs = sum(trace.runs for trace in some)
    if runs < 2 * KEPT_RUNS:
        assert hot == set(whole.hot()) and whole.runs == runs
        assert set(whole.blocks) == {number for trace in some for number in trace.blocks}
    assert set(whole.recordings) == {name for trace in some for name in trace.recordings}
    chance.shuffle(some)  # type: ignore[attr-defined]
    assert merge_all(some) == whole


@given(stored())
def test_of_one_workload_it_is_that_trace(some: list[Trace]) -> None:
    assert merge_all(some[:1]) == structs.replace(some[0], workload=ANY_WORKLOAD)


def test_who_is_not_trusted_is_not_in_it(said: list[str]) -> None:
    """However often it is made, a recording is in it once; and it goes with the last one."""
    ours, theirs = SigningKey.make(), SigningKey.make()
    trust = Trust([TrustedKey(PublicKey(ours.public, "ours"), "ours.pub")])

    def trace(workload: str, block: int) -> Trace:
        return Trace(tree=TREE, workload=workload, runs=1, blocks=[block], seen=[1], first_ms=[1])

    async def run() -> None:
        store = FaultyStore(open_store(STORE))  # not this user's own
        first, second, third = (trace(digit * 16, block) for block, digit in enumerate("123"))
        await publish_traces(store, [first], COUNT, theirs, Trust())
        for _ in range(2):
            await publish_traces(store, [second, third], COUNT, ours, trust)
            found = await read_stored(store, TREE, ALL_TRACES, COUNT, trust)
            assert found is not None and found.where == f"{store.url}/traces/{TREE}/any.json"
            assert (found.trace.runs, sorted(found.trace.blocks)) == (2, [1, 2])
        assert len(said) == 2 and all(f"{first.workload}.json" in line for line in said)
        assert sorted(await list_stored(store, TREE)) == [each.workload for each in (first, second, third)]
        await store.delete(f"traces/{TREE}/{second.workload}.json")
        await renew_all(store, TREE, COUNT, ours, trust)
        found = await read_stored(store, TREE, ALL_TRACES, COUNT, trust)
        assert found is not None and found.trace.blocks == [2]
        await store.delete(f"traces/{TREE}/{third.workload}.json")
        await renew_all(store, TREE, COUNT, ours, trust)
        assert await read_stored(store, TREE, ALL_TRACES, COUNT, trust) is None
        await store.aclose()

    run_with_store(run)


def test_only_the_first_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only what we would believe ourselves. What is there stays: who overwrote it would be overwritten."""
    mine = Trace(tree=TREE, workload="1" * 16, runs=1, blocks=[3], seen=[1], first_ms=[1])
    path = f"traces/{TREE}/{mine.workload}.json"
    ours = SigningKey.make()

    async def run() -> None:
        store = FaultyStore(open_store(STORE))  # not this user's own
        trust = Trust([TrustedKey(PublicKey(ours.public, "ours"), "ours.pub")])
        kept = Traces(os.fspath(tmp_path), TREE, COUNT, store, trust)
        shared = []
        for key in (None, SigningKey.make(), ours, ours):
            monkeypatch.setattr(KeyDirectory, "read_private", lambda _, key=key: key)
            shared.append(await kept.share(structs.replace(mine, blocks=[len(shared)])))
            if not any(shared):
                assert await list_stored(store, TREE) == []
        assert shared == [False, False, True, False]
        found = parse(await read_small(store, path, 1 << 20), PAYLOAD_TYPE, "it")
        assert decode(found.payload, TREE, COUNT, "it").blocks == [2]
        await store.aclose()

    run_with_store(run)
