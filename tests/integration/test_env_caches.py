"""Compile caches between nodes that share a store: seeded, captured, merged, limited, never from a stranger."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.compile_cache import caches
from bootseer.env.compile_cache.caches import TRIES, Captured, FirstStepCaches, Seeded
from bootseer.env.compile_cache.document import PAYLOAD_TYPE, decode, name_of
from bootseer.env.compile_cache.store import CacheStore
from bootseer.errors import StorageTimeout, Unavailable
from bootseer.storage import Store, open_store
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey, parse, seal
from tests.testing.faulty_store import Fault, FaultyStore, Kind

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
ADA, EVE = SigningKey.make(name="ada"), SigningKey.make(name="eve")
ADAS = Trust([TrustedKey(PublicKey(ADA.public, "ada"), "/keys/ada.pub")])
NOBODY = Trust([])


class Node:
    """A machine of the job, with a disk of its own."""

    def __init__(self, folder: Path, url: str, *, trust: Trust = ADAS, key: str = KEY, **more: Any) -> None:
        self.environ = {"BOOTSEER_CACHE": os.fspath(folder)}
        self.caches = FirstStepCaches(key, self.environ, url=url, trust=trust, **{"signing_key": ADA, **more})
        self.folder = Path(self.caches.path)

    def seed(self, **more: Any) -> Seeded:
        return self.caches.seed(**more)

    def capture(self) -> Captured:
        return self.caches.capture(pause=lambda _: None)

    def write(self, path: str, data: bytes = b"code", *, age_s: float = 60.0) -> Path:
        """As a framework does that renames."""
        full = self.folder / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data)
        at = time.time() - age_s
        os.utime(full, (time.time(), at))
        return full

    def files(self) -> dict[str, bytes]:
        found = {}
        for above, _, names in os.walk(self.folder):
            for name in names:
                path = Path(above) / name
                if not name.startswith(".bootseer"):
                    found[os.path.relpath(path, self.folder)] = path.read_bytes()
        return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "store")


@pytest.fixture
def node(tmp_path: Path, url: str) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str, **more: Any) -> Node:
        made.append(Node(tmp_path / name, more.pop("url", url), **more))
        return made[-1]

    yield make
    for each in made:
        each.caches.close()
    aio.close()


def generations(url: str, key: str = KEY) -> list[str]:
    return sorted(name for name in os.listdir(f"{url}/caches/{key}") if name.startswith("cache-"))


# ---- from node to node -------------------------------------------------------------------------------------


def test_what_one_start_compiled_the_next_one_finds(node: Callable[..., Node]) -> None:
    first = node("a")
    assert first.seed().is_cold
    kernel = first.write("inductor/ab/cone.py", b"x = 1\n", age_s=100)
    first.write("triton/ABC/k.cubin", bytes(300_000) + b"end")
    done = first.capture()
    assert (done.generation, done.files, done.evicted) == (1, 2, 0)
    second = node("b")
    found = second.seed()
    assert (found.files, found.generation, found.is_cold) == (2, 1, False)
    assert "signed by ada" in found.line
    assert second.files() == first.files()
    assert (second.folder / "inductor/ab/cone.py").stat().st_mtime_ns == kernel.stat().st_mtime_ns
    assert (second.folder / "inductor/ab/cone.py").stat().st_mode & 0o777 == 0o600
    assert second.seed().files == 0  # all there
    assert second.capture().generation == 0  # nothing new


def test_two_models_of_two_nodes_are_merged(node: Callable[..., Node]) -> None:
    first, second, third = node("a"), node("b"), node("c")
    first.write("inductor/ab/cone.py", b"1")
    second.write("inductor/cd/ctwo.py", b"2")
    assert first.capture().generation == 1
    assert second.capture().generation == 2  # the first node's bytes come from the store
    third.seed()
    assert third.files() == {"inductor/ab/cone.py": b"1", "inductor/cd/ctwo.py": b"2"}


def test_a_seed_overwrites_nothing(node: Callable[..., Node]) -> None:
    first, second = node("a"), node("b")
    first.write("inductor/ab/cone.py", b"theirs")
    first.write("inductor/ab/ctwo.py", b"theirs")
    first.capture()
    second.write("inductor/ab/cone.py", b"mine")
    assert second.seed().files == 1
    assert second.files() == {"inductor/ab/cone.py": b"mine", "inductor/ab/ctwo.py": b"theirs"}


def test_tritons_groups_are_found_at_another_path(node: Callable[..., Node]) -> None:
    first, second = node("a"), node("b")
    first.write("triton/ABC/k.cubin", b"code")
    group = json.dumps({"child_paths": {"k.cubin": f"{first.folder}/triton/ABC/k.cubin"}}).encode()
    first.write("triton/ABC/__grp__k.json", group)
    first.capture()
    second.seed()
    there = json.loads((second.folder / "triton/ABC/__grp__k.json").read_bytes())["child_paths"]["k.cubin"]
    assert there == f"{second.folder}/triton/ABC/k.cubin"
    assert os.path.isfile(there)
    assert second.capture().generation == 0  # it is the same group


def test_what_is_bound_to_its_path_is_not_put_elsewhere(node: Callable[..., Node], tmp_path: Path) -> None:
    first = node("a")
    first.write("extensions/fast/main.cpp", b"int", age_s=90)
    first.write("extensions/fast/fast.so", (Path("/bin/true")).read_bytes(), age_s=80)
    first.write("extensions/fast/build.ninja", b"rule")
    assert first.capture().files == 3
    elsewhere = node("b")
    assert elsewhere.seed().files == 0
    first.caches.close()
    shutil.rmtree(tmp_path / "a")
    again = node("a")  # a new machine with the same paths
    assert again.seed().files == 3
    assert again.files().keys() == {f"extensions/fast/{name}" for name in ("main.cpp", "fast.so", "build.ninja")}


def test_own_directories_are_kept_too(node: Callable[..., Node], tmp_path: Path) -> None:
    first = node("a", own={"mine": os.fspath(tmp_path / "own a")})
    path = tmp_path / "own a" / "x.bin"
    path.parent.mkdir()
    path.write_bytes(b"tuned")
    first.capture()
    second = node("b", own={"mine": os.fspath(tmp_path / "own b")})
    assert second.seed().files == 1
    assert (tmp_path / "own b" / "x.bin").read_bytes() == b"tuned"
    assert node("c").seed().files == 0  # nobody asked for it there


def test_without_a_store_caches_stay_on_the_node(node: Callable[..., Node]) -> None:
    alone = node("a", url="")
    alone.write("inductor/ab/cone.py")
    assert not alone.seed().is_cold
    assert alone.capture().generation == 0
    assert alone.caches.variables["TORCHINDUCTOR_CACHE_DIR"].startswith(os.fspath(alone.folder))


# ---- at once, and within limits ----------------------------------------------------------------------------


class _Overtaken(FaultyStore):
    """Somebody else publishes just before."""

    def __init__(self, inner: Store, others: list[Callable[[], object]]) -> None:
        super().__init__(inner)
        self.others = others

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Any:
        if if_absent and path.startswith("cache-") and self.others:
            await aio.run_io(self.others.pop(0))
        return await super().publish(path, data, if_absent=if_absent)


def test_whoever_is_slower_merges_again(node: Callable[..., Node], url: str) -> None:
    others = [node(f"fast{number}", wait_s=0.0) for number in range(3)]  # these do not wait for their turn
    for number, each in enumerate(others):
        each.write(f"inductor/f{number}/c.py", b"%d" % number)
    taken: list[Callable[[], object]] = [each.capture for each in others]
    slow = node("slow", url="", store=lambda: _Overtaken(open_store(f"{url}/caches/{KEY}"), taken))
    slow.write("inductor/ss/c.py", b"slow")
    done = slow.capture()
    assert done.generation == 4, done.line
    last = node("last")
    last.seed()
    assert last.files().keys() == {"inductor/ss/c.py", *(f"inductor/f{number}/c.py" for number in range(3))}


def test_whoever_is_always_slower_gives_up_with_a_line(node: Callable[..., Node], url: str) -> None:
    fast = node("fast", wait_s=0.0)
    numbers = iter(range(1000))

    def overtake() -> None:
        fast.write(f"inductor/ff/c{next(numbers)}.py", b"x")
        assert fast.capture().generation

    slow = node("slow", url="", store=lambda: _Overtaken(open_store(f"{url}/caches/{KEY}"), [overtake] * 100))
    slow.write("inductor/ss/c.py", b"slow")
    done = slow.capture()
    assert "are not published" in done.line and done.has_failed
    assert next(numbers) == TRIES


def test_the_limit_holds_over_fifty_starts_and_so_does_the_store(
    node: Callable[..., Node], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start compiles something of its own on a fresh node and uses one of the first start's files."""
    chance, limit = random.Random(1), 400_000
    monkeypatch.setattr("bootseer.env.compile_cache.store.GRACE_S", 0.0)
    monkeypatch.setattr(CacheStore.collect_garbage, "__kwdefaults__", {"grace_s": 0.0, "now_s": None})
    for start in range(50):
        each = node(f"node{start}", limit_bytes=limit)
        each.seed()
        each.write(f"inductor/{start:02}/c.py", chance.randbytes(30_000))
        if start == 0:
            each.write("inductor/of use/c.py", chance.randbytes(30_000))
        else:
            (each.folder / "inductor/of use/c.py").read_bytes()
        done = each.capture()
        assert done.generation == start + 1, done.line
        assert done.size <= limit
        each.caches.close()
        shutil.rmtree(each.folder)
    last = node("last", limit_bytes=limit)
    assert last.seed().size <= limit
    assert "inductor/of use/c.py" in last.files()
    assert "inductor/49/c.py" in last.files()
    assert "inductor/01/c.py" not in last.files()
    there = sum(path.stat().st_size for path in Path(url).rglob("*") if path.is_file())
    assert there < 4 * limit, "what nobody needs any more stays in the store"


def test_what_is_seeded_and_what_was_there_are_within_the_limit_together(node: Callable[..., Node]) -> None:
    limit = 400_000
    other = node("other", limit_bytes=limit)
    for number in range(10):
        other.write(f"inductor/theirs{number}/c.py", bytes(35_000))
    assert other.capture().files == 10
    ours = node("ours", limit_bytes=limit)
    for number in range(10):
        ours.write(f"inductor/ours{number}/c.py", bytes(35_000))
    assert ours.seed().files == 10
    files = ours.files()
    assert sum(map(len, files.values())) <= limit
    assert {f"inductor/theirs{number}/c.py" for number in range(10)} <= files.keys()


def test_packs_of_what_stays_are_not_written_again(node: Callable[..., Node], url: str) -> None:
    first = node("a")
    for number in range(24):
        first.write(f"triton/{number:02}/k.cubin", random.Random(number).randbytes(1 << 20))
    first.capture()
    packs = set(os.listdir(f"{url}/caches/{KEY}/packs"))
    assert len(packs) == 2
    first.write("triton/AA/k.cubin", b"new")
    assert first.capture().generation == 2
    assert len(packs & set(os.listdir(f"{url}/caches/{KEY}/packs"))) == 2


# ---- strangers ---------------------------------------------------------------------------------------------


def head_path(url: str, number: int = 1, key: str = KEY) -> Path:
    return Path(url) / "caches" / key / name_of(number)


@pytest.fixture
def captured(node: Callable[..., Node], url: str) -> Node:
    """A generation in a store that anybody may write to."""
    first = node("a")
    first.write("inductor/ab/cone.py", b"good")
    first.capture()
    for above, _, names in os.walk(url):
        os.chmod(above, 0o777)
        for name in names:
            os.chmod(os.path.join(above, name), 0o666)
    return first


def assert_cold(reader: Node, words: str) -> None:
    found = reader.seed()
    assert found.is_cold
    assert words in found.line, found.line
    assert "\n" not in found.line
    assert reader.files() == {}


def test_a_signed_generation_is_trusted_in_any_store(node: Callable[..., Node], captured: Node) -> None:
    assert node("b").seed().files == 1


def test_an_unsigned_one_only_in_a_place_of_ones_own(node: Callable[..., Node], url: str) -> None:
    first = node("a", trust=NOBODY, signing_key=None)
    first.write("inductor/ab/cone.py")
    first.capture()
    assert node("b", trust=NOBODY).seed().files == 1
    os.chmod(f"{url}/caches/{KEY}", 0o777)
    assert_cold(node("c", trust=NOBODY), "is not signed")


def test_a_strangers_signature_is_none(node: Callable[..., Node], url: str, captured: Node) -> None:
    envelope = parse(head_path(url).read_bytes(), PAYLOAD_TYPE, "", max_bytes=1 << 20)
    head_path(url).write_bytes(seal(envelope.payload, PAYLOAD_TYPE, EVE))
    assert_cold(node("b"), "is signed by no trusted key")


def test_what_was_changed_after_it_was_signed_is_not_loaded(
    node: Callable[..., Node], url: str, captured: Node
) -> None:
    table = json.loads(head_path(url).read_bytes())
    table["payload"] = table["payload"][:-8] + "AAAAAAA="
    head_path(url).write_bytes(json.dumps(table).encode())
    assert_cold(node("b"), "was changed after ada")


def test_caches_of_another_key_are_not_loaded(node: Callable[..., Node], url: str, captured: Node) -> None:
    shutil.copytree(f"{url}/caches/{KEY}", f"{url}/caches/{OTHER_KEY}")
    assert_cold(node("b", key=OTHER_KEY), "another key")


def test_an_old_generation_under_a_new_number_is_not_loaded(
    node: Callable[..., Node], url: str, captured: Node
) -> None:
    shutil.copy(head_path(url), head_path(url, 7))
    reader = node("b")
    assert reader.seed().generation == 1
    assert any("generation 1 under another name" in note for note in reader.caches.notes)
    captured.write("inductor/cd/cnew.py")
    assert captured.capture().generation == 2


@pytest.mark.parametrize("part", ["packs", "index"])
def test_damaged_trees_are_not_loaded_and_heal(
    node: Callable[..., Node], url: str, captured: Node, part: str
) -> None:
    (path,) = (Path(url) / "caches" / KEY / part).iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    reader = node("b")
    assert_cold(reader, "damaged")
    reader.write("inductor/ab/cone.py", b"good again")
    reader.write("inductor/cd/ctwo.py", b"more")
    assert reader.capture().generation == 2, reader.caches.notes
    third = node("c")
    third.seed()
    assert third.files() == reader.files()


def test_a_lost_pack_heals_too(node: Callable[..., Node], url: str, captured: Node) -> None:
    shutil.rmtree(f"{url}/caches/{KEY}/packs")
    other = node("b")
    assert_cold(other, "packs/")
    other.write("inductor/cd/ctwo.py", b"more")
    assert other.capture().generation == 2
    assert node("c").seed().files == 1


def test_a_list_that_is_not_that_of_the_tree_is_not_loaded(
    node: Callable[..., Node], url: str, captured: Node
) -> None:
    import msgspec

    envelope = parse(head_path(url).read_bytes(), PAYLOAD_TYPE, "", max_bytes=1 << 20)
    generation = decode(envelope.payload, "", KEY, 1)
    (fact,) = generation.files
    lying = msgspec.structs.replace(
        generation, files=[msgspec.structs.replace(fact, path="inductor/ab/cother.py")]
    )
    head_path(url).write_bytes(seal(msgspec.json.encode(lying), PAYLOAD_TYPE, ADA))
    assert_cold(node("b"), ", which its list names")


def test_a_link_on_the_way_leads_nowhere(node: Callable[..., Node], captured: Node, tmp_path: Path) -> None:
    """Whoever can put a link into this user's own folder is this user; nothing of theirs is overwritten."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "cone.py").write_bytes(b"precious")
    reader = node("b")
    (reader.folder / "inductor" / "ab").symlink_to(outside)
    reader.seed()
    assert (outside / "cone.py").read_bytes() == b"precious"


# ---- stores that fail --------------------------------------------------------------------------------------


def faulty(url: str, *plan: Fault) -> Callable[[], Store]:
    return lambda: FaultyStore(open_store(f"{url}/caches/{KEY}"), plan)


@pytest.mark.parametrize("operation", ["stat", "read_into"])
def test_a_store_that_does_not_answer_is_a_cold_start(
    node: Callable[..., Node], url: str, captured: Node, operation: str
) -> None:
    reader = node("b", url="", store=faulty(url, Fault(Kind.ERROR, operation)))
    assert_cold(reader, "compile caches are not used")
    reader.write("inductor/ab/cone.py")
    assert "are not published" in reader.capture().line
    assert generations(url) == ["cache-000001.json"]


@pytest.mark.parametrize("operation", ["create", "publish", "write"])
def test_a_capture_that_fails_leaves_the_last_generation(
    node: Callable[..., Node], url: str, captured: Node, operation: str
) -> None:
    writer = node("b", url="", store=faulty(url, Fault(Kind.ERROR, operation)))
    writer.write("inductor/cd/ctwo.py", b"new")
    assert "are not published" in writer.capture().line
    assert node("c").seed().files == 1


def test_a_store_that_cannot_list_says_its_newest(node: Callable[..., Node], url: str) -> None:
    first = node("a", signing_key=ADA)
    first.write("inductor/ab/cone.py")
    first.capture()
    # What is asked for the second time is the hint, as of a web server.
    reader = node("b", url="", store=faulty(url, Fault(Kind.ERROR, "list", error=Unavailable)))
    assert reader.seed().files == 1


def test_a_store_that_did_not_answer_is_not_waited_for_again(
    node: Callable[..., Node], url: str, captured: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the seed of a restart nor, within one capture, for its turn and for what it has to say."""
    silent = Fault(Kind.ERROR, "list", error=StorageTimeout)
    calls: list[str] = []

    def make() -> Store:
        calls.append("opened")
        return faulty(url, silent)()

    reader = node("b", url="", store=make)
    reader.write("inductor/cd/ctwo.py", b"new")
    assert "by plan" in reader.capture().line
    assert len(calls) == 1
    assert "did not answer a moment ago" in reader.seed().line
    assert len(calls) == 1
    assert "by plan" in reader.capture().line, "a capture asks again: nobody waits for it"
    found = node("c").seed(is_silent=True)
    assert (found.files, found.is_lost) == (0, True), "somebody else has asked it"
    monkeypatch.setattr(caches, "SILENT_FOR_S", 0.0)
    assert "by plan" in reader.seed().line, "after a while a seed does, too"


def test_a_slow_store_is_not_waited_for(node: Callable[..., Node], url: str) -> None:
    first = node("a")
    for number in range(40):
        first.write(f"triton/{number:02}/k.cubin", random.Random(number).randbytes(500_000))
    first.capture()
    slow = Fault(Kind.DELAY, "read_into", "packs/*", delay_s=0.4)
    reader = node("b", url="", store=faulty(url, slow))
    found = reader.seed(timeout_s=0.3)
    assert found.is_cold
    assert "not fetched in time" in found.line
    assert found.took_s < 10
    assert not any(name.startswith(".bootseer-staging") for name in os.listdir(reader.folder))


def test_another_job_on_the_node_keeps_its_locks(node: Callable[..., Node], tmp_path: Path, url: str) -> None:
    first = node("a")
    lock = first.write("extensions/fast/lock", b"")
    with closing(FirstStepCaches(KEY, first.environ, url=url, trust=ADAS)) as second:
        second.seed()
        assert lock.exists()
    first.seed()
    assert not lock.exists()
