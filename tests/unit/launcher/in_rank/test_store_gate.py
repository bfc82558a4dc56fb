"""Where forked ranks wait for torch's store, with a table like torch's."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from launcher.in_rank import store_gate
from tests.docs_blocks import TOP


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with torch's table, whose handlers are words."""
    module = types.ModuleType(store_gate.RENDEZVOUS)
    module._rendezvous_handlers = {"env": "torch's", "file": "files"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, store_gate.RENDEZVOUS, module)
    return module


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """What rank 0 binds, and does not listen at yet."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound


def test_the_first_lookup_waits_and_the_table_is_torchs_again(
    rendezvous: types.ModuleType, store: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = rendezvous._rendezvous_handlers
    port = store.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    store_gate.install(socket, port, 2, 1)
    rendezvous._rendezvous_handlers["own"] = "the script's"
    found: list[tuple[str, float]] = []
    looking = threading.Thread(
        target=lambda: found.append((rendezvous._rendezvous_handlers["env"], time.monotonic()))
    )
    looking.start()
    looking.join(0.05)
    assert looking.is_alive() and not found
    listened_s = time.monotonic()
    store.listen()
    looking.join()
    assert found[0][0] == "torch's" and found[0][1] >= listened_s
    assert rendezvous._rendezvous_handlers is table
    assert table == {"env": "torch's", "file": "files", "own": "the script's"}


@pytest.mark.parametrize(("scheme", "port"), [("file", None), ("env", "1"), ("env", "")])
def test_other_ways_and_other_ports_do_not_wait(
    rendezvous: types.ModuleType,
    store: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    port: str | None,
) -> None:
    table = rendezvous._rendezvous_handlers
    monkeypatch.setattr(store_gate, "await_listener", pytest.fail)
    own = store.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(own) if port is None else port)
    store_gate.install(socket, own, 2, 1)
    assert rendezvous._rendezvous_handlers[scheme] == table[scheme]
    assert rendezvous._rendezvous_handlers is table


def test_an_unknown_way_is_torchs_error(rendezvous: types.ModuleType) -> None:
    store_gate.install(socket, 1, 2, 1)
    assert "mpi" not in rendezvous._rendezvous_handlers
    with pytest.raises(KeyError):
        rendezvous._rendezvous_handlers["mpi"]


class Store:
    """As torch's: it tells its arguments, and converts them when it is made."""

    def __init__(self, **arguments: object) -> None:
        """__init__(self: Store, host_name: str, wait_for_workers: bool = True) -> None"""
        self.is_counting = bool(arguments.get("wait_for_workers", True))


@pytest.fixture
def torchs(rendezvous: types.ModuleType) -> types.ModuleType:
    rendezvous.TCPStore = Store  # type: ignore[attr-defined]
    return rendezvous


def test_rank_0_does_not_count_the_clients_of_its_first_store(
    torchs: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    store_gate.install(socket, 29500, 2, 0)
    assert torchs._rendezvous_handlers["env"] == "torch's"
    assert not torchs.TCPStore(host_name="localhost").is_counting
    assert torchs.TCPStore is Store
    assert torchs._rendezvous_handlers["env"] == "torch's"
    assert torchs.TCPStore(host_name="localhost").is_counting


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [(0, "MASTER_PORT", "1"), (0, "TORCHELASTIC_USE_AGENT_STORE", "True"), (1, "RANK", "1")],
)
def test_other_stores_count(
    torchs: types.ModuleType, monkeypatch: pytest.MonkeyPatch, place: int, name: str, value: str
) -> None:
    monkeypatch.setattr(store_gate, "await_listener", lambda *_: None)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv(name, value)
    store_gate.install(socket, 29500, 2, place)
    assert torchs._rendezvous_handlers["env"] == "torch's"
    assert torchs.TCPStore is Store


@pytest.mark.parametrize("store", [None, object(), len, "wait_for_workers: bool"])
def test_a_torch_without_this_argument_counts(rendezvous: types.ModuleType, store: object) -> None:
    rendezvous.TCPStore = store  # type: ignore[attr-defined]
    store_gate.count_no_clients(rendezvous)
    assert rendezvous.TCPStore is store
    del rendezvous.TCPStore  # type: ignore[attr-defined]
    store_gate.count_no_clients(rendezvous)
    assert not hasattr(rendezvous, "TCPStore")


def test_torchs_own_store_understands_it() -> None:
    """Rank 0 of two makes its store alone; without this it would wait for the other for the whole limit."""
    code = """
import os, socket, sys
from datetime import timedelta
import torch.distributed as dist
from launcher.in_rank import store_gate
module = sys.modules[store_gate.RENDEZVOUS]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
store_gate.install(socket, port, 2, 0)
store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
assert (rank, size) == (0, 2) and module.TCPStore is dist.TCPStore
store.set("key", "value")
assert dist.TCPStore("127.0.0.1", port, 2, False).get("key") == b"value"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50, cwd=TOP)


def test_who_never_listens_is_not_waited_for_for_ever(
    store: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, pauses = 0.0, []

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        pauses.append(pause_s)

    monkeypatch.setattr(store_gate.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(store_gate.time, "sleep", sleep)
    store_gate.await_listener(socket, store.getsockname()[1], 3)
    assert store_gate.MAX_WAIT_S < now_s < store_gate.MAX_WAIT_S + 0.1
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(3 * store_gate.MIN_PAUSE_S)
    assert pauses[-1] == pytest.approx(3 * store_gate.MAX_PAUSE_S)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listener_is_seen(family: int) -> None:
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1" if family == socket.AF_INET else "::", 0))
        port = server.getsockname()[1]
        assert not store_gate.is_listened_on(socket, port)
        server.listen()
        assert store_gate.is_listened_on(socket, port)
    assert not store_gate.is_listened_on(socket, port)


@pytest.mark.parametrize("handlers", [None, "not a table"])
def test_another_torch_has_no_place(monkeypatch: pytest.MonkeyPatch, handlers: object) -> None:
    module = types.ModuleType(store_gate.RENDEZVOUS)
    if handlers is not None:
        module._rendezvous_handlers = handlers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, store_gate.RENDEZVOUS, module)
    assert not store_gate.has_place()
    monkeypatch.delitem(sys.modules, store_gate.RENDEZVOUS)
    assert not store_gate.has_place()
