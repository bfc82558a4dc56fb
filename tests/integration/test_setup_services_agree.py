"""What keepers publish under a key is what that key says, and what they say is in place is what was asked.

Keepers are driven by hand, in bootrun's place: so two of them can be brought to the same moment without luck.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bootseer.own_module import command_of
from tests.integration.setup_jobs import Machine, services_end
from tests.made_wheels import make_wheel
from tests.support import MARK, clean_environ, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 90.0


class Service:
    """One that has been told what the job wants."""

    def __init__(self, machine: Machine, command: str, *, target: Path | None = None, **more: Any) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            command_of("bootseer.env.service.main"),
            stdin=theirs.fileno(),
            env=environ_of(machine),
            cwd=machine.folder,
        )
        theirs.close()
        ours.settimeout(DEADLINE_S)
        self._sock, self._file = ours, ours.makefile("rb")
        self.said: list[str] = []
        ways = more.pop("ways", ("there", "unpack"))
        spec: dict[str, Any] = {
            "commands": [command],
            "inputs": [],
            "targets": [os.fspath(target or machine.venv)],
            "store": os.fspath(machine.store),
            "python": "" if target else os.fspath(machine.venv / "bin" / "python"),
            "variables": [],
            "salt": "",
            "max_age_s": None,
            "timeout_s": 60.0,
            "wait_s": 30.0,
            "cwd": os.fspath(machine.folder),
        }
        order = {"spec": spec | more, "ways": ways, "workload": ["python3", "train.py"], "own": []}
        log_path = os.fspath(machine.folder / "setup.log")
        self.ask("start", **order, log_path=log_path, is_plain=False, why_plain="")

    def ask(self, do: str, **fields: object) -> None:
        self._sock.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")

    def wait(self, *dids: str) -> dict[str, Any]:
        """The next answer that is one of these; what it says before that is kept."""
        for line in self._file:
            answer: dict[str, Any] = json.loads(line)
            if answer["did"] == "said":
                self.said.append(answer["text"])
            if answer["did"] in dids:
                return answer
            assert answer["did"] != "failed", answer
        raise AssertionError(f"the keeper has ended before {dids}: {self.said}")

    def build(self) -> dict[str, Any]:
        """Until it is known whether it was published."""
        self.ask("build", is_urgent=True)
        self.wait("ready")
        return self.wait("published", "unpublished")

    def close(self) -> None:
        self._file.close()
        self._sock.close()
        self.process.wait(DEADLINE_S)


def environ_of(machine: Machine) -> dict[str, str]:
    found: dict[str, str | None] = {**clean_environ(), MARK: os.environ[MARK], **machine.environ}
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path / "node")
    services_end()


@contextmanager
def service(machine: Machine, command: str, **more: Any) -> Iterator[Service]:
    made = Service(machine, command, **more)
    try:
        yield made
    finally:
        made.close()


def pip(machine: Machine, *words: str) -> str:
    python = machine.venv / "bin" / "python"
    install = f"{sys.executable} -m pip --python {python} install -q --no-index --find-links {machine.wheels}"
    return f"{install} {' '.join(words)}"


def installed(machine: Machine) -> list[str]:
    return sorted(path.name for path in machine.venv.rglob("*.dist-info"))


def publish(machine: Machine, command: str, **more: Any) -> dict[str, Any]:
    """A start on a new node; its answer."""
    with service(machine, command, **more) as one:
        one.wait("looked")
        answer = one.build()
    assert answer["did"] == "published", (answer, one.said)
    return answer


# ---- two jobs at one target ------------------------------------------------------------------------------------


def test_what_another_job_has_installed_meanwhile_is_no_part_of_what_a_key_says(machine: Machine) -> None:
    make_wheel(machine.wheels, "other", "1.0")
    with (
        service(machine, pip(machine, "small==1.0")) as first,
        service(machine, pip(machine, "small==1.0", "other==1.0")) as second,
    ):
        first.wait("looked")
        key = second.wait("looked")["key"]
        assert first.build()["did"] == "published"
        answer = second.build()
        assert answer["did"] == "unpublished", "it would lack what the first one installed"
        assert str(machine.venv) in answer["why"]
        assert installed(machine) == ["other-1.0.dist-info", "small-1.0.dist-info"]
    assert len(machine.snapshots()) == 1
    assert not list(machine.store.glob(f"keys/{key}/env-*.json"))
    with service(machine, pip(machine, "small==1.0", "other==1.0")) as third:
        assert third.wait("looked")["tree"] == ""
        third.ask("own", tree="")
        assert third.wait("ready")["how"] == "there", "its own run is known by the key that it then had"


def test_two_restores_at_one_target_are_never_mixed(machine: Machine) -> None:
    make_wheel(machine.wheels, "small", "2.0", files={"small/only_in_2.py": ""})
    commands = [pip(machine, f"small=={version}") for version in ("1.0", "2.0")]
    for command in commands:
        publish(machine, command)
        machine.renew()
    with service(machine, commands[0]) as first, service(machine, commands[1]) as second:
        trees = [each.wait("looked")["tree"] for each in (first, second)]
        assert all(trees)
        first.ask("use", tree=trees[0])
        first.wait("fetched")
        first.ask("show", tree=trees[0])
        assert first.wait("ready")["how"] == "unpack"
        second.ask("use", tree=trees[1])
        answer = second.wait("fetched", "unfetched")
        assert answer["did"] == "unfetched"
        assert ": changed since" in answer["why"]
        assert installed(machine) == ["small-1.0.dist-info"]
        second.ask("own", tree="")
        assert second.wait("ready")["how"] == "installed"
        assert installed(machine) == ["small-2.0.dist-info"]


@pytest.mark.parametrize("ways", [("there", "unpack"), ("unpack",)])
def test_what_was_in_place_is_looked_at_again(machine: Machine, ways: tuple[str, ...]) -> None:
    make_wheel(machine.wheels, "small", "2.0")
    command = pip(machine, "small==1.0")
    tree = publish(machine, command)["tree"]
    with service(machine, command, ways=ways) as first, service(machine, pip(machine, "small==2.0")) as second:
        assert first.wait("looked")["tree"] == tree
        second.wait("looked")
        second.ask("own", tree="")
        second.wait("ready")
        first.ask("use", tree=tree)
        assert first.wait("fetched", "unfetched")["did"] == "unfetched"
        assert installed(machine) == ["small-2.0.dist-info"]


def test_what_changes_while_other_nodes_are_waited_for_is_seen(machine: Machine) -> None:
    make_wheel(machine.wheels, "small", "2.0")
    command = pip(machine, "small==1.0")
    tree = publish(machine, command)["tree"]
    with service(machine, command) as first, service(machine, pip(machine, "small==2.0")) as second:
        first.wait("looked")
        second.wait("looked")
        first.ask("use", tree=tree)
        first.wait("fetched")
        second.ask("own", tree="")
        second.wait("ready")
        first.ask("show", tree=tree)
        assert first.wait("ready", "unfetched")["did"] == "unfetched"


# ---- inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_inputs_that_change_are_not_published_under_the_key_of_the_old_ones(machine: Machine, moment: str) -> None:
    make_wheel(machine.wheels, "small", "2.0")
    begun, go = machine.folder / "begun", machine.folder / "go"
    command = f"touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; {pip(machine, '-r requirements.txt')}"
    with service(machine, command) as one:
        one.wait("looked")
        if moment == "before":
            machine.requirements.write_text("small==2.0\n")
        one.ask("build", is_urgent=True)
        if moment == "meanwhile":
            wait_until(begun.exists, DEADLINE_S, "set-up")
            machine.requirements.write_text("small==2.0\n")
        go.touch()
        assert one.wait("ready")["how"] == "installed"
        answer = one.wait("published", "unpublished")
    if moment == "before":
        assert answer["did"] == "unpublished"
        assert "requirements.txt" in answer["why"]
        assert machine.snapshots() == []
    else:
        assert answer["did"] == "published", "pip has read the new ones, and so the key is theirs"
    machine.requirements.write_text("small==1.0\n")
    with service(machine, command) as next_one:
        next_one.wait("looked")
        next_one.ask("own", tree="")
        assert next_one.wait("ready")["how"] == "installed", "nobody asked for 2.0 under this key"
    assert installed(machine) == ["small-1.0.dist-info"]


def test_an_input_that_set_up_makes_is_no_changed_one(machine: Machine) -> None:
    made = machine.folder / "made.txt"
    command = f"cp {machine.requirements} {made} && {pip(machine, '-r made.txt')}"
    publish(machine, command)


# ---- set-up that fails half way --------------------------------------------------------------------------------


def half(machine: Machine) -> str:
    """As `make install`: nothing is done twice, and no package knows of it. The second half needs a server."""
    tool = machine.venv / "bin" / "tool"
    once = f"{{ test -e {tool} || echo built > {tool}; }}"
    return f"{once}; test -e {machine.folder}/server && {pip(machine, 'small==1.0')}"


def fail_half_way(machine: Machine) -> None:
    with service(machine, half(machine)) as one:
        one.wait("looked")
        one.ask("build", is_urgent=True)
        one.wait("failed")
    assert (machine.venv / "bin" / "tool").exists()
    (machine.folder / "server").touch()


def test_what_a_failed_set_up_has_left_is_never_missing_in_what_is_kept(machine: Machine) -> None:
    fail_half_way(machine)
    with service(machine, half(machine)) as again:
        assert "did not finish" in again.wait("looked")["why"], "another node may build"
        answer = again.build()
        assert answer["did"] == "unpublished"
        assert str(machine.venv) in answer["why"]
    assert machine.snapshots() == []
    with service(machine, half(machine)) as third:
        third.wait("looked")
        third.ask("own", tree="")
        assert third.wait("ready")["how"] == "there", "it is no reason to run set-up at each start"
    make_wheel(machine.wheels, "other", "1.0")
    with service(machine, f"{half(machine)} other==1.0") as on_top:
        on_top.wait("looked")
        assert on_top.build()["did"] == "unpublished"


def test_a_target_that_was_made_again_is_kept_again(machine: Machine) -> None:
    fail_half_way(machine)
    shutil.rmtree(machine.venv)
    shutil.copytree(machine.pristine, machine.venv, symlinks=True)
    publish(machine, half(machine))
    machine.renew()
    with service(machine, half(machine)) as fresh:
        tree = fresh.wait("looked")["tree"]
        fresh.ask("use", tree=tree)
        fresh.wait("fetched")
        fresh.ask("show", tree=tree)
        assert fresh.wait("ready")["how"] == "unpack"
    assert (machine.venv / "bin" / "tool").exists()


def test_set_up_that_failed_and_changed_nothing_can_be_kept_when_it_works(machine: Machine) -> None:
    command = pip(machine, "-r requirements.txt", "late==1.0")
    with service(machine, command) as one:
        one.wait("looked")
        one.ask("build", is_urgent=True)
        one.wait("failed")
    make_wheel(machine.wheels, "late", "1.0")
    publish(machine, command)


def test_what_is_in_place_is_not_when_set_up_of_another_one_failed_over_it(machine: Machine) -> None:
    """Also where the files that it has are as they were."""
    command = pip(machine, "small==1.0")
    publish(machine, command)
    fail_half_way(machine)
    with service(machine, command) as one:
        one.wait("looked")
        one.ask("own", tree="")
        assert one.wait("ready")["how"] == "installed"


def test_beforehand_nothing_is_kept_of_what_failed_half_way_either(machine: Machine) -> None:
    bootseer = os.path.join(os.path.dirname(sys.executable), "bootseer")
    words = [bootseer, "env", "snapshot", "--python", f"{machine.venv}/bin/python", "--setup", half(machine)]
    words += ["--env-store", f"{machine.store}", "--setup-target", f"{machine.venv}"]
    for is_again in (False, True):
        run = subprocess.run(
            words, env=environ_of(machine), cwd=machine.folder, capture_output=True, text=True, check=False
        )
        assert run.returncode != 0
        assert ("recreate the directory" in run.stderr) is is_again, run.stderr
        (machine.folder / "server").touch()
    assert machine.snapshots() == []


# ---- another tree of the same key ------------------------------------------------------------------------------


def test_one_tree_does_not_go_over_another_of_the_same_key(machine: Machine) -> None:
    """What the command gives is in no file: another day it makes something else."""
    target = machine.place / "tools"
    command = f"mkdir -p {target} && touch {target}/$(cat /proc/sys/kernel/random/uuid)"
    old = publish(machine, command, target=target)["tree"]
    names = os.listdir(target)
    with another_node(machine, target):
        shutil.rmtree(machine.store)
        machine.store.mkdir()
        new = publish(machine, command, target=target)["tree"]
    assert new != old
    with service(machine, command, target=target) as one:
        assert one.wait("looked")["tree"] == old
        assert any("another environment of this key" in line for line in one.said), one.said
        one.ask("use", tree=new)
        assert one.wait("fetched", "unfetched")["did"] == "unfetched"
        assert os.listdir(target) == names


def test_a_tree_goes_over_what_a_node_made_for_itself_where_nothing_of_that_is_left(machine: Machine) -> None:
    target = machine.place / "tools"
    command = f"mkdir -p {target} && cat /proc/sys/kernel/random/uuid > {target}/file"
    with service(machine, command, target=target) as one:
        one.wait("looked")
        one.ask("own", tree="")
        one.wait("ready")
    with another_node(machine, target):
        tree = publish(machine, command, target=target)["tree"]
        of_that_node = (target / "file").read_text()
    with service(machine, command, target=target) as one:
        assert one.wait("looked")["tree"] == ""
        one.ask("use", tree=tree)
        one.wait("fetched")
        one.ask("show", tree=tree)
        assert one.wait("ready")["how"] == "unpack"
    assert (target / "file").read_text() == of_that_node


@contextmanager
def another_node(machine: Machine, target: Path) -> Iterator[None]:
    """At the same paths; what this one has is aside meanwhile."""
    cache = machine.folder / "cache"
    services_end()  # what brings it to disk writes to the cache
    for path in (target, cache):
        path.rename(f"{path}-aside")
    yield
    services_end()
    for path in (target, cache):
        shutil.rmtree(path)
        Path(f"{path}-aside").rename(path)


# ---- what is shown ---------------------------------------------------------------------------------------------


def test_no_password_or_token_of_the_stores_address_is_shown(machine: Machine, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=os.fspath(site))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://me:hunter2word@127.0.0.1:{server.server_port}/envs?sig=tokenoftokens"
            with service(machine, pip(machine, "small==1.0"), store=url) as one:
                shown = [json.dumps(one.wait("looked"))]
                one.ask("use", tree="ab" * 32)  # as if another node had found it
                shown.append(json.dumps(one.wait("unfetched")))
                one.ask("own", tree="")
                one.wait("ready")
        finally:
            server.shutdown()
            serving.join()
    text = "\n".join([*shown, *one.said])
    assert "127.0.0.1" in text
    assert "hunter2" not in text and "tokenof" not in text
