"""Who is believed: by signature, by owner, or not, with a line that says what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, IntegrityError, NotFound, SourceChanged, Untrusted
from bootseer.storage import Store
from bootseer.storage.local.store import LocalStore
from bootseer.storage.memory import MemoryStore, forget
from bootseer.storage.small_files import read_small
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey, seal
from tests.testing.faulty_store import Fault, FaultyStore, Kind

TYPE = "application/vnd.bootseer.test+json"
ADA, EVE = SigningKey.make(name="ada"), SigningKey.make(name="eve")
ADAS = Trust([TrustedKey(PublicKey(ADA.public, "ada"), "/keys/ada.pub")])
NOBODYS = Trust()


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def mine(tmp_path: Path) -> Store:
    (tmp_path / "mine").mkdir()
    return LocalStore(str(tmp_path / "mine"))


@pytest.fixture
def anybodys(tmp_path: Path) -> Store:
    (tmp_path / "anybodys").mkdir()
    (tmp_path / "anybodys").chmod(0o777)
    return LocalStore(str(tmp_path / "anybodys"))


def read(trust: Trust, store: Store, data: bytes) -> bytes:
    async def run() -> bytes:
        await store.publish("a.json", data)
        payload = await trust.read(data, TYPE, store, "a.json")
        assert (await trust.fetch(store, "a.json", TYPE)).payload == payload
        return payload

    return asyncio.run(run())


def refused(trust: Trust, store: Store, data: bytes) -> str:
    with pytest.raises(Untrusted) as caught:
        read(trust, store, data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{store.url}/a.json: ")
    return str(caught.value)


def test_what_a_trusted_key_signed_is_trusted_anywhere(mine: Store, anybodys: Store) -> None:
    for data in (seal(b"x", TYPE, ADA), seal(b"x", TYPE, EVE, ADA), seal(b"x", TYPE, ADA, EVE)):
        assert read(ADAS, mine, data) == read(ADAS, anybodys, data) == b"x"


def test_a_place_of_this_users_own_needs_no_key(mine: Store, anybodys: Store) -> None:
    for trust in (ADAS, NOBODYS):
        for data in (seal(b"x", TYPE, None), seal(b"x", TYPE, EVE)):
            assert read(trust, mine, data) == b"x"
            refused(trust, anybodys, data)


def test_refusals_say_what_to_do(anybodys: Store) -> None:
    text = refused(ADAS, anybodys, seal(b"x", TYPE, None))
    assert "is not signed, and " in text and "anybodys can be written to by others (mode 0777): chmod go-w" in text
    assert "`bootseer keys make`" in text
    text = refused(ADAS, anybodys, seal(b"x", TYPE, EVE))
    assert f"is signed by no trusted key ({EVE.keyid[:16]}), and " in text
    assert "`bootseer keys trust FILE.pub`" in text and "`bootseer keys make`" in text
    ignoring = Trust(ignored=["/keys/eve.pub can be written to by others"])
    assert "; not used: /keys/eve.pub can be" in refused(ignoring, anybodys, seal(b"x", TYPE, EVE))


def test_what_is_wrong_under_a_trusted_name_is_refused_even_at_home(mine: Store, anybodys: Store) -> None:
    signed = seal(b"x", TYPE, ADA)
    wrong = signed.replace(b'"eA=="', b'"eQ=="')
    assert wrong != signed
    for store in (mine, anybodys):
        assert "was changed after ada" in refused(ADAS, store, wrong)
    assert read(NOBODYS, mine, wrong) == b"y", "who does not know the key has only the owner"


def test_what_is_no_envelope_is_an_error_anywhere(mine: Store) -> None:
    for data in (b"", b"{}", seal(b"x", "another/type", ADA)):
        with pytest.raises(IntegrityError) as caught:
            read(ADAS, mine, data)
        assert not isinstance(caught.value, Untrusted)


def test_reasons_are_given() -> None:
    store = MemoryStore("reasons")

    async def run(data: bytes) -> str:
        await store.publish("a.json", data)
        return (await ADAS.fetch(store, "a.json", TYPE)).because

    try:
        assert asyncio.run(run(seal(b"x", TYPE, ADA))) == f"signed by ada ({ADA.keyid[:16]})"
        assert asyncio.run(run(seal(b"x", TYPE, None))) == "unsigned, but only you can write there"
    finally:
        forget("reasons")


def test_a_file_that_is_exchanged_after_it_was_read(mine: Store) -> None:
    """Its owner is asked about the bytes that are used, not about those that are there by then."""

    async def run() -> None:
        await mine.publish("a.json", seal(b"mine", TYPE, None))
        with pytest.raises(Untrusted, match="was exchanged while it was read"):
            await NOBODYS.read(seal(b"evil", TYPE, None), TYPE, mine, "a.json")

    asyncio.run(run())


def test_sizes_are_bounded(mine: Store) -> None:
    data = seal(bytes(70_000), TYPE, ADA)

    async def run(max_bytes: int) -> int:
        await mine.publish("a.json", data)
        return len((await ADAS.fetch(mine, "a.json", TYPE, max_bytes=max_bytes)).payload)

    assert asyncio.run(run(len(data))) == 70_000
    with pytest.raises(IntegrityError, match="at most"):
        asyncio.run(run(len(data) - 1))


# ---- reading whole files -----------------------------------------------------------------------------------


@pytest.fixture
def faulty() -> Iterator[FaultyStore]:
    yield FaultyStore(MemoryStore("whole"))
    forget("whole")


def test_whole_files(faulty: FaultyStore) -> None:
    async def run() -> None:
        for data in (b"", b"abc", bytes(range(256)) * 100):
            await faulty.publish("a", data)
            assert await read_small(faulty, "a", len(data)) == data
        with pytest.raises(NotFound):
            await read_small(faulty, "b", 9)
        with pytest.raises(IntegrityError, match="25600 bytes; at most 25599"):
            await read_small(faulty, "a", 25599)

    asyncio.run(run())


def test_a_file_that_is_replaced_while_it_is_read(faulty: FaultyStore) -> None:
    async def run() -> None:
        await faulty.publish("a", b"abc")
        faulty.plan = [Fault(Kind.CHANGED, calls=[0, 1])]
        assert await read_small(faulty, "a", 9) == b"abc"
        faulty.plan = [Fault(Kind.CHANGED)]
        with pytest.raises(SourceChanged, match="changes faster than it can be read"):
            await read_small(faulty, "a", 9)

    asyncio.run(run())


def test_a_store_that_fails_is_asked_again(faulty: FaultyStore) -> None:
    async def run() -> None:
        await faulty.publish("a", b"abc")
        faulty.plan = [Fault(Kind.ERROR, calls=[0])]
        assert await read_small(faulty, "a", 9) == b"abc"
        faulty.plan = [Fault(Kind.ERROR, "stat", error=NotFound)]
        with pytest.raises(BootseerError):
            await read_small(faulty, "a", 9)

    asyncio.run(run())
