"""Names of modules in a store: who is believed, and what is taken of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec
import pytest

from bootseer import aio
from bootseer.env.capture.hot_imports import (
    MAX_MODULES,
    MAX_NAME_CHARS,
    PAYLOAD_TYPE,
    HotImports,
    read,
    share,
)
from bootseer.errors import NotFound
from bootseer.storage import open_store
from bootseer.storage.memory import forget
from bootseer.trust import KeyDirectory, PublicKey, SigningKey, Trust, TrustedKey, seal
from tests.testing.faulty_store import Fault, FaultyStore, Kind

TREE, WORKLOAD = "ab" * 32, "0123456789abcdef"
PATH = f"imports/{TREE}/{WORKLOAD}.json"
STORE = "memory://test-hot-imports"
NAMES = ["torch", "torch._dynamo", "yaml"]


@dataclass
class Place:
    """A store that is not this user's own."""

    key: SigningKey | None = field(default_factory=SigningKey.make)

    def __post_init__(self) -> None:
        self.store = FaultyStore(open_store(STORE))
        trusted = [TrustedKey(PublicKey(self.key.public, "ours"), "ours.pub")] if self.key else []
        self.trust = Trust(trusted)

    async def share(self, names: list[str]) -> bool:
        return await share(self.store, TREE, WORKLOAD, names, self.trust)

    async def read(self, workload: str = WORKLOAD) -> list[str]:
        return await read(self.store, TREE, workload, self.trust)

    async def put(self, payload: bytes, key: SigningKey | None) -> None:
        await self.store.publish(PATH, seal(payload, PAYLOAD_TYPE, key))


Run = Callable[[Callable[[Place], Coroutine[object, object, None]]], Place]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs what is given, with a store of its own, as a user who has the key."""

    def run(test: Callable[[Place], Coroutine[object, object, None]]) -> Place:
        place = Place()
        monkeypatch.setattr(KeyDirectory, "read_private", lambda _: place.key)
        try:
            aio.run_sync(test(place))
        finally:
            aio.close()
            forget(STORE.removeprefix("memory://"))
        return place

    return run


def test_what_one_shares_others_read(run: Run, said: list[str]) -> None:
    async def test(place: Place) -> None:
        assert await place.read() == []
        assert not await place.share([])
        assert await place.share(NAMES)
        assert await place.read() == NAMES
        assert not await place.share(["other"]), "the first one stays"
        assert await place.read() == NAMES
        assert await place.read("f" * 16) == []

    run(test)
    assert said == []


@pytest.mark.parametrize("believes_itself", [True, False])
def test_of_two_that_share_at_once_the_first_one_stays(run: Run, believes_itself: bool) -> None:
    """Both have seen that there is none."""

    async def test(place: Place) -> None:
        assert await place.share(NAMES)
        place.store.plan.append(Fault(Kind.ERROR, "stat", error=NotFound))
        trusted, place.trust = place.trust, place.trust if believes_itself else Trust()
        assert not await place.share(["other"])
        place.trust = trusted
        place.store.plan.clear()
        assert await place.read() == NAMES

    run(test)


def test_who_has_no_key_shares_nothing_with_strangers(run: Run) -> None:
    async def test(place: Place) -> None:
        place.key = None
        assert not await place.share(NAMES)
        assert await place.read() == []

    run(test)


def test_what_its_own_user_would_not_believe_does_not_stay(run: Run) -> None:
    async def test(place: Place) -> None:
        place.trust = Trust()
        assert not await place.share(NAMES)
        assert PATH not in [entry.path for entry in await place.store.list(f"imports/{TREE}")]

    run(test)


def test_only_as_much_as_anybody_takes_is_shared(run: Run) -> None:
    async def test(place: Place) -> None:
        names = ["x" * (MAX_NAME_CHARS + 1), "", *(f"m{number}" for number in range(MAX_MODULES + 5))]
        assert await place.share(names)
        assert await place.read() == names[2 : 2 + MAX_MODULES]

    run(test)


OTHERS = {
    "another tree": HotImports(tree="cd" * 32, workload=WORKLOAD, modules=NAMES),
    "another workload": HotImports(tree=TREE, workload="f" * 16, modules=NAMES),
    "another format": HotImports(format="bootseer-imports/2", tree=TREE, workload=WORKLOAD, modules=NAMES),
    "too many": HotImports(tree=TREE, workload=WORKLOAD, modules=["m"] * (MAX_MODULES + 1)),
    "too long": HotImports(tree=TREE, workload=WORKLOAD, modules=["m" * (MAX_NAME_CHARS + 1)]),
    "no name": HotImports(tree=TREE, workload=WORKLOAD, modules=[""]),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_list_for_this_start_is_not_used(what: str, run: Run, said: list[str]) -> None:
    async def test(place: Place) -> None:
        await place.put(msgspec.json.encode(OTHERS[what]), place.key)
        assert await place.read() == []

    run(test)
    (line,) = said
    assert PATH in line


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000], ids=range(5))
def test_damage(payload: bytes, run: Run, said: list[str]) -> None:
    async def test(place: Place) -> None:
        await place.put(payload, place.key)
        assert await place.read() == []

    run(test)
    (line,) = said
    assert PATH in line


def test_a_stranger_is_not_trusted(run: Run, said: list[str]) -> None:
    good = msgspec.json.encode(HotImports(tree=TREE, workload=WORKLOAD, modules=NAMES))

    async def test(place: Place) -> None:
        for key in (None, SigningKey.make()):
            await place.put(good, key)
            assert await place.read() == []

    run(test)
    assert len(said) == 2
