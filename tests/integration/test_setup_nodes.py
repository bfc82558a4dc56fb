"""`bootrun --setup` of several nodes: one environment everywhere, whatever happens to one of them on the way.

Nodes are namespaces of their own (bench/netns.py); each sees its own virtual environment at the one path.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import netns
from tests.integration.setup_jobs import Machine, services_end
from tests.made_wheels import make_wheel
from tests.support import BOOTRUN, clean_environ, lacking
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(240)]

PORT = "29533"
DEADLINE_S = 90.0


@pytest.fixture
def two_hosts() -> Iterator[netns.Hosts]:
    reason = netns.why_not()
    if reason:
        lacking(reason)
    with netns.Hosts(2) as made:
        yield made
    services_end()


class Index:
    """A package index as pip asks it, over HTTP; its releases are in no key."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder = folder / "simple" / "small"
        self.folder.mkdir(parents=True)

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        handler = functools.partial(Handler, directory=os.fspath(folder))
        self._server = http.server.ThreadingHTTPServer((host, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.host = host
        self.url = f"http://{host}:{self._server.server_address[1]}/simple"

    def release(self, version: str) -> None:
        make_wheel(self.folder, "small", version)
        names = sorted(path.name for path in self.folder.glob("*.whl"))
        links = "".join(f'<a href="{name}">{name}</a>' for name in names)
        (self.folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Nodes:
    """Two nodes with one machine's paths: what is below them is each one's own."""

    def __init__(self, hosts: netns.Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.machine = Machine(folder / "node")
        self.folder = folder
        self.machine.requirements.write_text("small\n")  # not pinned
        self.count = 0
        self.shares_place = False
        self.command = ""  # other than to install from the wheels

    def own(self, number: int) -> list[str]:
        """Words before a command that show a node its own files."""
        own = self.folder / f"own{number}"
        shutil.rmtree(own, ignore_errors=True)
        words = self.machine.as_node(own, shares_place=self.shares_place)
        self.prepare(number, own / "place" / "venv")
        return words

    def prepare(self, number: int, venv: Path) -> None:
        """What else a node has before it starts; for tests to replace."""

    def make_keys(self) -> None:
        """What a store that is not this machine's is believed by."""
        directory = os.fspath(self.machine.folder / "home" / ".config" / "bootseer" / "keys")
        self.machine.environ["BOOTSEER_KEYS"] = directory
        environ = {name: value for name, value in self.machine.environ.items() if value is not None}
        made = subprocess.run(
            [os.path.join(os.path.dirname(BOOTRUN), "bootseer"), "keys", "make"],
            env={**clean_environ(), **environ},
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr

    def stored(self) -> dict[str, bytes]:
        """All that is in the machine's store, by path."""
        store = self.machine.store
        return {
            path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()
        }

    def run(self, stores: tuple[str, str], *flags: str) -> tuple[list[int], list[str]]:
        """Statuses and outputs of both."""
        self.count += 1
        outputs, jobs = [], []
        environ = {**clean_environ(), **{k: v for k, v in self.machine.environ.items() if v is not None}}
        environ["TMPDIR"] = os.fspath(self.machine.folder / "tmp")
        for number, host in enumerate(self.hosts.hosts):
            words = [
                *("--nnodes", "2", "--rdzv-backend", "c10d", "--node-rank", str(number)),
                *("--rdzv-endpoint", f"{self.hosts.hosts[0].address}:{PORT}", "--rdzv-id", f"j{self.count}"),
                *("--log-dir", f"{self.folder}/logs{self.count}-{number}"),
            ]
            setup = self.machine.flags("--env-way", "there,unpack", *flags, store=stores[number])
            setup.remove("--standalone")
            if self.command:
                setup[setup.index("--setup") + 1] = self.command
            output = f"{self.folder}/out{self.count}-{number}"
            argv = [*self.own(number), sys.executable, BOOTRUN, *words, *setup, os.fspath(self.machine.script)]
            jobs.append(host.start(argv, environ, output))
            outputs.append(output)
        statuses = []
        end_s = time.monotonic() + DEADLINE_S
        for job in jobs:
            try:
                statuses.append(job.wait(max(1.0, end_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(-99)
        return statuses, [Path(output).read_text(errors="replace") for output in outputs]


@pytest.fixture
def nodes(two_hosts: netns.Hosts, tmp_path: Path) -> Nodes:
    return Nodes(two_hosts, tmp_path)


def test_one_builds_and_the_other_takes_it(nodes: Nodes) -> None:
    store = os.fspath(nodes.machine.store)
    statuses, outputs = nodes.run((store, store))
    assert statuses == [0, 0], "\n".join(outputs)
    assert all("has 1.0" in output for output in outputs), "\n".join(outputs)
    assert nodes.machine.count() == 1, "\n".join(outputs)


def test_environment_on_a_file_system_that_both_have(nodes: Nodes) -> None:
    """One node is at the folder when the other one comes; neither waits for the other for ever."""
    store = os.fspath(nodes.machine.store)
    statuses, outputs = nodes.run((store, store))
    assert statuses == [0, 0], "\n".join(outputs)
    nodes.shares_place = True
    statuses, outputs = nodes.run((store, store))
    both = "\n".join(outputs)
    assert statuses == [0, 0], both
    assert all("has 1.0" in output for output in outputs), both
    assert nodes.machine.count() <= 2, both  # on a machine that is slow today one has waited long enough


def test_nodes_that_begin_with_something_else_end_with_the_table_of_differences(nodes: Nodes) -> None:
    """Set-up is run on both, once more, and what differs is told."""

    def prepare(number: int, venv: Path) -> None:
        if number == 1:
            (found,) = venv.glob("lib/python3*/site-packages")
            (found / "other-3.0.dist-info").mkdir()
            (found / "other-3.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 3.0\n")

    nodes.prepare = prepare  # type: ignore[method-assign]
    store = os.fspath(nodes.machine.store)
    statuses, outputs = nodes.run((store, store))
    both = "\n".join(outputs)
    assert statuses == [1, 1], both
    assert "the nodes have different Python environments" in outputs[0], both
    assert "other" in outputs[0].partition("different Python environments")[2], both
    assert all("every node runs set-up, once" in output for output in outputs), both
    assert nodes.machine.count() == 4, both


def test_set_up_that_fails_on_one_ends_the_job_on_both(nodes: Nodes) -> None:
    nodes.machine.requirements.write_text("missing==1.0\n")
    store = os.fspath(nodes.machine.store)
    statuses, outputs = nodes.run((store, store))
    assert statuses == [1, 1], "\n".join(outputs)
    assert all("set-up failed" in output for output in outputs), "\n".join(outputs)


def test_cut_off_in_mid_restore_while_there_is_a_newer_release(nodes: Nodes) -> None:
    """One environment everywhere, and the job says what happened."""
    machine = nodes.machine
    nodes.make_keys()
    machine.environ |= {"PIP_NO_INDEX": None, "PIP_FIND_LINKS": None}
    host = nodes.hosts.hosts[0].address.rpartition(".")[0] + ".254"
    index = Index(nodes.folder / "index", host)
    try:
        index.release("1.0")
        python = machine.venv / "bin" / "python"
        nodes.command = (
            f"{sys.executable} -m pip --python {python} install -q --index-url {index.url} --trusted-host {host} "
            f"-r {machine.requirements}"
        )
        store = os.fspath(machine.store)
        statuses, outputs = nodes.run((store, store))
        assert statuses == [0, 0], "\n".join(outputs)
        assert all("has 1.0" in output for output in outputs), "\n".join(outputs)
        stored = nodes.stored()
        files = {f"{place}/{name}": data for place in ("store", "cut") for name, data in stored.items()}
        index.release("2.0")
        with FaultyHttpServer(files, host=host) as server:
            statuses, outputs = nodes.run((f"{server.url}/store", f"{server.url}/cut"))
        both = "\n".join(outputs)
        assert statuses == [0, 0], both
        assert all("has 1.0" in output for output in outputs), "what is kept is what all have\n" + both
        packs = "cut/trees/*/packs/*"
        faults = [
            HttpFault(HttpKind.RESET, packs, keep_bytes=100, requests={0}),
            HttpFault(HttpKind.RESET, packs),
        ]
        with FaultyHttpServer(files, faults, host=host) as server:
            statuses, outputs = nodes.run((f"{server.url}/store", f"{server.url}/cut"))
            assert server.count(path="store/trees/*/packs/*"), "the other one had got it"
            assert server.count(path="cut/trees/*/packs/*"), "it was in the middle of it"
    finally:
        index.close()
    both = "\n".join(outputs)
    assert statuses == [0, 0], both
    assert all("has 2.0" in output for output in outputs), both
    assert all("node2 cannot fetch the kept environment" in output for output in outputs), both
    assert all("every node runs set-up itself" in output for output in outputs), both
