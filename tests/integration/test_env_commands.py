"""`bootseer env ...` as people run it: the real program, real virtual environments, pip and wheels made here."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.compile_cache.caches import FirstStepCaches
from bootseer.trust import Trust
from tests.contract import servers
from tests.integration.captured_envs import environ_of, make_venv
from tests.made_wheels import make_wheel
from tests.support import BOOTRUN, lacking, processes, wait_until
from tests.testing.trees import FileFacts, snapshot

BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
KEY = "ab" * 32
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


class Node:
    """`bootseer env` of a user: a project, an interpreter's environment, a store."""

    def __init__(self, top: Path) -> None:
        self.top, self.work, self.venv, self.store = top, top / "work", top / "venv", top / "store"
        self.work.mkdir()
        keys = top / "keys"
        keys.mkdir(mode=0o700)
        self.environ = environ_of(
            top,
            BOOTSEER_CACHE=os.fspath(top / "cache"),
            BOOTSEER_RUNTIME=os.fspath(top / "run"),
            BOOTSEER_KEYS=os.fspath(keys),
            BOOTSEER_ENV_STORE=os.fspath(self.store),
            PYTHON_EXEC=os.fspath(self.venv / "bin/python"),
        )
        make_wheel(top / "wheels", "alpha", "1.0", requires=["beta"], scripts={"alpha": "alpha:main"})
        make_wheel(top / "wheels", "beta", "1.0", files={"beta/data.bin": bytes(range(256)) * 2000})
        make_wheel(top / "wheels", "beta", "2.0")
        (self.work / "requirements.txt").write_text("alpha==1.0\nbeta==1.0\n")
        make_venv(self.venv)
        shutil.copytree(self.venv, top / "fresh", symlinks=True)

    @property
    def pip(self) -> str:
        """A set-up command, with the pip of the tests' interpreter."""
        return (
            f"{sys.executable} -m pip --python {self.venv}/bin/python install -q --no-index"
            f" --find-links {self.top}/wheels -r requirements.txt"
        )

    @property
    def setup(self) -> list[str]:
        return ["--setup", self.pip, "--setup-input", "requirements.txt"]

    def __call__(
        self, *words: object, status: int = 0, group: str = "env", environ: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        argv = [BOOTSEER, group, *map(str, words)]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            env={**self.environ, **(environ or {})},
            cwd=self.work,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == status, (argv, done.stdout[-2000:], done.stderr[-3000:])
        assert "Traceback" not in done.stderr
        return done

    def ask(self, *words: object, status: int = 0, **more: Any) -> Any:
        return json.loads(self(*words, "--json", status=status, **more).stdout)

    def start(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [BOOTSEER, "env", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self.environ,
            cwd=self.work,
        )

    def become_another(self) -> None:
        """A fresh machine with the same paths."""
        shutil.rmtree(self.venv)
        shutil.rmtree(self.top / "cache", ignore_errors=True)
        shutil.copytree(self.top / "fresh", self.venv, symlinks=True)

    def version(self, name: str, venv: Path | None = None) -> str:
        program = (venv or self.venv) / "bin/python"
        done = subprocess.run(
            [program, "-c", f"import {name}; print({name}.VERSION)"], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    yield Node(tmp_path)
    aio.close()


def installed(directory: Path) -> dict[bytes, FileFacts]:
    """All of an environment but bytecode: that of a snapshot is whole, that of an installation may not be."""
    found = snapshot(os.fspath(directory))
    return {path: seen for path, seen in found.items() if b"__pycache__" not in path}


def files_of(directory: Path) -> dict[str, str]:
    return {
        os.path.relpath(path, directory): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# ---- snapshot and restore ------------------------------------------------------------------------------------


def test_what_was_set_up_here_is_restored_there(node: Node) -> None:
    guess = node("key", *node.setup).stdout.strip()
    made = node.ask("snapshot", *node.setup)
    key = made["key"]
    assert key != guess, "what set-up reads is not known before it has run"
    assert made["is_ours"] and made["targets"] == [os.fspath(node.venv)]
    assert made["expires_s"] is None and made["python"].startswith("3.") and made["files"] > 5
    before = installed(node.venv)
    assert node.version("alpha") == "1.0"
    assert node("key", *node.setup).stdout.strip() == key  # this node is set up, and knows it
    assert node.ask("restore", *node.setup)["how"] == "there"

    node.become_another()
    assert node.version("alpha") == ""
    done = node.ask("restore", *node.setup)
    assert (done["how"], done["restored_to"]) == ("unpack", [os.fspath(node.venv)])
    after = installed(node.venv)
    assert after == before
    assert node.version("alpha") == "1.0"
    script = subprocess.run([node.venv / "bin/alpha"], capture_output=True, text=True, check=False)
    assert script.stdout == "1.0\n"
    check = [sys.executable, "-m", "pip", "--python", node.venv / "bin/python", "check"]
    assert subprocess.run(check, env=node.environ, capture_output=True, check=False).returncode == 0
    assert node.ask("restore", *node.setup)["how"] == "there"
    assert node.ask("restore", key[:8])["how"] == "there"


@pytest.mark.slow
def test_set_up_runs_once_and_again_only_when_reported(node: Node) -> None:
    count = node.top / "count"
    setup = ["--setup", f"echo run >> {count}", *node.setup]
    first = node("snapshot", *setup)
    assert "set-up took" in first.stdout
    second = node("snapshot", *setup)
    assert "exists already" in second.stdout
    assert f"for a new one recreate {node.venv} first, then use --rebuild" in second.stdout
    assert count.read_text() == "run\n"
    before = files_of(node.store)
    told = node("snapshot", *setup, "--rebuild", status=1)
    assert f"{node.venv}: has this environment already, so the changes of set-up are not known" in told.stderr
    assert files_of(node.store) == before and count.read_text() == "run\n"
    node.become_another()
    assert "; --rebuild makes a new one\n" in node("snapshot", *setup).stdout
    assert node.ask("snapshot", *setup, "--rebuild")["generation"] == 2
    assert count.read_text() == "run\nrun\n"
    node.become_another()
    assert node.ask("restore", *setup)["how"] == "unpack" and node.version("beta") == "1.0"


def test_its_own_output_is_shown_and_kept_where_asked(node: Node) -> None:
    setup = ["--setup", "echo hello from set-up", *node.setup]
    done = node("snapshot", *setup, "--log", "setup.log")
    assert "[setup] hello from set-up\n" in done.stderr and "hello" not in done.stdout
    assert "hello from set-up\n" in (node.work / "setup.log").read_text()
    assert not [name for name in os.listdir(node.top / "tmp") if name.startswith("bootseer-")]
    node.become_another()
    quiet = node("snapshot", *setup, "--rebuild", "--quiet")
    assert "hello" not in quiet.stderr


def test_two_at_once_build_once(node: Node) -> None:
    count = node.top / "count"
    setup = ["--setup", f"echo run >> {count}", "--setup", "sleep 1", *node.setup]
    # Two builders on two machines: targets of their own, one key.
    running = [node.start("snapshot", *setup, "--json") for _ in range(2)]
    ended = [(each.communicate(timeout=110), each.returncode) for each in running]
    assert [status for _, status in ended] == [0, 0], ended
    records = [json.loads(stdout) for (stdout, _), _ in ended]
    assert count.read_text() == "run\n"
    assert sorted(each["is_ours"] for each in records) == [False, True]
    assert len({each["tree"] for each in records}) == 1


def test_set_up_that_fails_is_one_line_and_publishes_nothing(node: Node) -> None:
    done = node("snapshot", "--setup", "echo no such wheel >&2; exit 3", status=1)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("bootseer: error: set-up command 1 of 1") and "status 3" in line
    log = line.rpartition("(full output: ")[2].rstrip(")")
    assert "no such wheel" in Path(log).read_text()
    listed = node.ask("list")["environments"]
    assert listed == []
    # Whoever comes next builds.
    (node.work / "requirements.txt").write_text("beta==1.0\n")
    assert node.ask("snapshot", *node.setup)["is_ours"]


def test_set_up_that_takes_too_long_ends(node: Node) -> None:
    done = node("snapshot", "--setup", "sleep 60", "--setup-timeout", "0.3", status=1)
    assert "--setup-timeout" in done.stderr.splitlines()[-1]


def test_what_nobody_would_believe_is_not_built(node: Node) -> None:
    node.store.mkdir()
    node.store.chmod(0o777)
    count = node.top / "count"
    done = node("snapshot", "--setup", f"touch {count}", status=1)
    assert "publishing disabled: the next start" in done.stderr and "bootseer keys make" in done.stderr
    assert not count.exists()
    node("make", "--name", "ada", group="keys")
    assert "signed by ada" in node.ask("snapshot", *node.setup)["because"]
    node.become_another()
    refused = node("snapshot", *node.setup, "--rebuild", "--unsigned", status=1)
    assert "no key to sign with" in refused.stderr


@pytest.mark.slow
def test_a_store_on_a_web_server_is_read_by_key(node: Node) -> None:
    node("make", "--name", "ada", group="keys")
    key = node.ask("snapshot", *node.setup)["key"]
    node.become_another()
    with servers.serve_directory(node.store) as url:
        web = {"BOOTSEER_ENV_STORE": url}
        refused = node("snapshot", *node.setup, "--rebuild", status=1, environ=web)
        assert "cannot create a file exactly once" in refused.stderr and "[setup]" not in refused.stderr
        assert node.ask("explain", *node.setup, environ=web)["is_found"]
        assert "is read-only" in node("gc", status=1, environ=web).stderr
        done = node.ask("restore", key, environ=web)
        assert done["how"] == "unpack" and "signed by ada" in done["because"]
    assert node.version("alpha") == "1.0"
    gone = node("restore", key, status=1, environ=web)
    assert len(gone.stderr.splitlines()) == 1 and gone.stderr.startswith("bootseer: error: ")


@pytest.mark.slow
def test_an_object_store(node: Node) -> None:
    node("make", "--name", "ada", group="keys")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as endpoint:
            headers = {"Authorization": "AWS x:x"}
            request = urllib.request.Request(f"{endpoint}/bucket", headers=headers, method="PUT")
            urllib.request.urlopen(request, timeout=10).close()
            node.environ |= {
                "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
                "BOOTSEER_ENV_STORE": "s3://bucket/envs",
            }  # fmt: skip
            assert "no environments" in node("list").stdout
            assert "no compile caches" in node("caches", "list").stdout
            made = node.ask("snapshot", *node.setup)
            assert made["is_ours"] and "signed by ada" in made["because"]
            node.become_another()
            assert node.ask("restore", made["key"][:12])["how"] == "unpack"
            assert node.version("beta") == "1.0"
            assert node.ask("verify")["environments"][0]["is_right"]
            assert len(node.ask("gc", "--older", "0", "--force")["removals"]) == 1
            assert node.ask("list")["environments"] == []


def test_what_is_interrupted_leaves_nothing_running(node: Node) -> None:
    mark = node.top / "started"
    running = node.start("snapshot", "--setup", f"touch {mark}; sleep 300.25")
    wait_until(mark.exists, 30, "set-up to begin")
    seen = node.ask("explain", "--setup", f"touch {mark}; sleep 300.25")
    assert f"process {running.pid}" in seen["builder"] and "is not finished" in seen["lines"][0]
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130, stderr
    assert not [each for each in processes() if "sleep 300.25" in each.command]
    assert not [name for name in os.listdir(node.top / "tmp") if name.startswith("bootseer-")]
    began_s = time.monotonic()
    made = node.ask("snapshot", "--setup", f"touch {mark}; sleep 0.25")  # its lease was given back
    assert made["is_ours"] and time.monotonic() - began_s < 14


def test_what_is_written_elsewhere_and_secrets_are_named(node: Node) -> None:
    (node.work / "settings").mkdir()
    setup = [
        "--setup", f"printf 'machine a login b password hunter22' > {node.venv}/.netrc",
        "--setup", "touch stray", *node.setup,
    ]  # fmt: skip
    done = node("snapshot", *setup, environ={"PIP_INDEX_URL": "https://me:hunter22@packages.example/simple"})
    assert f"left out, as all users of the store could read it: {node.venv}/.netrc" in done.stderr
    assert f"so not in the snapshot: {node.work}/stray" in done.stderr
    for path in node.store.rglob("*"):
        assert not path.is_file() or b"hunter22" not in path.read_bytes(), path
    assert "hunter22" not in done.stderr


def test_set_up_that_changes_nothing_says_where_it_was_looked(node: Node) -> None:
    done = node("snapshot", "--setup", "true")
    assert f"changed nothing in {node.venv}" in done.stderr and "--setup-target" in done.stderr


def test_another_path(node: Node) -> None:
    key = node.ask("snapshot", *node.setup)["key"]
    other = node.top / "other place" / "venv"
    other.parent.mkdir()
    missing = node("restore", key, "--to", other, status=1)
    assert "set-up began with a virtual environment" in missing.stderr and f"-m venv {other}" in missing.stderr
    make_venv(other)
    done = node.ask("restore", key, "--to", other)
    assert done["how"] == "unpack" and node.version("alpha", other) == "1.0"
    script = subprocess.run([other / "bin/alpha"], capture_output=True, text=True, check=False)
    assert script.stdout == "1.0\n"
    for path in (other / SITE).rglob("*"):
        assert (
            not path.is_file() or os.fsencode(node.venv) + b"/" not in path.read_bytes() or path.suffix == ".pyc"
        )
    wrong = node("restore", key, "--to", other, "--to", node.top / "third", status=1)
    assert "2 paths for 1 target:" in wrong.stderr
    system = node("restore", key, "--to", "/etc", status=1)
    assert "belongs to the system" in system.stderr


@pytest.mark.slow
def test_one_environment_does_not_come_on_top_of_another(node: Node) -> None:
    first = node.ask("snapshot", *node.setup)["key"]
    node.become_another()
    (node.work / "requirements.txt").write_text("beta==2.0\n")
    second = node.ask("snapshot", *node.setup)["key"]
    assert first != second
    before = files_of(node.venv)
    done = node("restore", first, status=1)
    assert f"has the environment {second[:12]} already" in done.stderr
    assert files_of(node.venv) == before
    node.become_another()
    node("restore", first)
    assert (node.version("alpha"), node.version("beta")) == ("1.0", "1.0")


@pytest.mark.slow
def test_a_change_on_top_of_what_is_there_is_an_environment_of_its_own(node: Node) -> None:
    node("snapshot", *node.setup)
    (node.work / "requirements.txt").write_text("alpha==1.0\nbeta==2.0\n")
    second = node.ask("snapshot", *node.setup)
    assert node.version("beta") == "2.0"
    # A fresh machine has another base: it does not get the second difference alone.
    node.become_another()
    assert node("key", *node.setup).stdout.strip() != second["key"]
    assert "can be used" in node("restore", *node.setup, status=1).stderr


def test_keys_that_cannot_be(node: Node) -> None:
    node.ask("snapshot", *node.setup)
    assert "not a key of an environment" in node("restore", "../../etc", status=1).stderr
    assert "has no key that begins with 0123456789" in node("restore", "0123456789", status=1).stderr
    assert "has no environment of the key" in node("restore", KEY, status=1).stderr
    for end in "01":
        (node.store / "keys" / ("abcdef" * 10 + "000" + end)).mkdir()
    assert "2 keys of" in node("restore", "abcdef", status=1).stderr
    assert "give its key" in node("restore", status=2).stderr
    assert "give only one" in node("restore", KEY, "--setup", "x", status=2).stderr
    gone = {"BOOTSEER_ENV_STORE": ""}
    assert "no environment store is named" in node("list", status=2, environ=gone).stderr


@pytest.mark.slow
def test_an_environment_that_set_up_makes_itself(node: Node) -> None:
    shutil.rmtree(node.venv)
    setup = [
        "--setup", f"{sys.executable} -m venv --without-pip {node.venv}", *node.setup,
        "--setup-target", node.venv,
    ]  # fmt: skip
    key = node.ask("snapshot", *setup)["key"]
    before = installed(node.venv)
    assert (node.version("alpha"), node("key", *setup).stdout.strip()) == ("1.0", key)
    shutil.rmtree(node.venv)
    shutil.rmtree(node.top / "cache")
    assert node("key", *setup).stdout.strip() == key
    assert node.ask("restore", *setup)["how"] == "unpack"
    assert installed(node.venv) == before and node.version("alpha") == "1.0"
    # At another path it needs nothing that was there before.
    done = node.ask("restore", key, "--to", node.top / "other")
    assert done["how"] == "unpack" and node.version("beta", node.top / "other") == "1.0"


@pytest.mark.slow
def test_bootrun_finds_what_was_made_beforehand(node: Node) -> None:
    key = node.ask("snapshot", *node.setup)["key"]
    node.become_another()
    (node.work / "train.py").write_text("import alpha; print('trained with', alpha.VERSION)\n")
    argv = [BOOTRUN, "--standalone", "--nproc-per-node", "1", "--env-way", "there,unpack", *node.setup, "train.py"]
    for _ in range(2):
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=110, check=False, env=node.environ, cwd=node.work
        )
        assert done.returncode == 0, done.stderr
        assert "trained with 1.0\n" in done.stdout
        assert "set-up is not run" in done.stderr and "[setup]" not in done.stdout + done.stderr
    assert node.ask("explain", *node.setup)["key"] == key
    # What a job has restored is there for the commands too, and the other way round.
    assert node.ask("restore", *node.setup)["how"] == "there"


@pytest.mark.slow
def test_uv_and_a_script_of_the_user(node: Node) -> None:
    uv = os.path.join(os.path.dirname(sys.executable), "uv")
    if not os.path.exists(uv):
        lacking("there is no uv")
    script = node.work / "install.sh"
    script.write_text(
        f"{uv} pip install -q --python {node.venv}/bin/python --no-index --find-links {node.top}/wheels alpha\n"
    )
    made = node("snapshot", "--setup", "sh install.sh")
    assert "install.sh counts" not in made.stderr and "declare files" not in made.stderr, "it was watched"
    node.become_another()
    assert node.ask("restore", "--setup", "sh install.sh")["how"] == "unpack"
    assert node.version("alpha") == "1.0"
    script.write_text(script.read_text() + "\n")
    assert "install.sh changed" in node("explain", "--setup", "sh install.sh").stdout


def test_the_file_of_the_project_does_as_well(node: Node) -> None:
    key = node("key", *node.setup).stdout
    text = (
        f"[setup]\ncommands = [{json.dumps(node.pip)}]\ninputs = ['requirements.txt']\n[env]\nstore = '../store'\n"
    )
    (node.work / "bootseer.toml").write_text(text)
    assert node("key", environ={"BOOTSEER_ENV_STORE": ""}).stdout == key
    made = node.ask("snapshot", environ={"BOOTSEER_ENV_STORE": ""})["key"]
    assert node("key", *node.setup).stdout.strip() == made
    assert node.ask("restore")["how"] == "there"


# ---- list, explain, verify, gc -------------------------------------------------------------------------------


def test_list_says_what_there_is(node: Node) -> None:
    mistyped = node("list", status=1).stderr
    assert f"{node.store}: there is no such directory" in mistyped and mistyped.count("\n") == 1
    node.store.mkdir(0o755)
    assert node("list").stdout == "the store has no environments\n"
    (node.work / "requirements.txt").write_text("alpha\nbeta==1.0\n")
    made = node("snapshot", *node.setup)
    assert "set-up is not pinned (alpha)" in made.stderr and "7 days" in made.stderr
    line = node("list").stdout
    for part in (
        "old",
        "stored",
        "expires in 7 days",
        os.fspath(node.venv),
        "unsigned, but only you can write there",
    ):
        assert part in line
    [record] = node.ask("list")["environments"]
    assert record["is_usable"] and record["generation"] == 1 and record["stored_bytes"] > 0
    assert record["targets"] == [os.fspath(node.venv)] and 0 <= time.time() - record["created_s"] < 200


def test_explain_says_field_by_field_what_changed(node: Node) -> None:
    missed = node("explain", *node.setup).stdout
    assert missed.startswith("not found: ") and "the store has no environment yet" in missed
    assert " (a first guess, until set-up has run)\n" in missed
    first = node.ask("snapshot", *node.setup)["key"]
    hit = node.ask("explain", *node.setup)
    assert hit["is_found"] and hit["key"] == first and hit["changes"] == []
    text = node("explain", *node.setup).stdout
    read, missing = (line for line in text.splitlines() if "(observed)" in line)
    assert read.startswith("set-up reads (observed): ") and "requirements.txt" not in missing
    assert missing.startswith("set-up looked for, and did not find (observed): ")
    assert "first guess" not in text
    node.become_another()
    (node.work / "requirements.txt").write_text("alpha==1.0\nbeta==2.0\n")
    make_wheel(node.top / "wheels", "gamma", "1.0")
    found = node.ask(
        "explain", *node.setup, "--setup-variable", "FLAVOUR", environ={"FLAVOUR": "mint", "CC": "cc"}
    )
    fields = {each["field"] for each in found["changes"]}
    assert not found["is_found"] and found["compared_with"] == first
    assert {"inputs:requirements.txt", "variables:FLAVOUR", "variables:CC"} <= fields
    assert f"reads:{node.top}/wheels (names in it)" in fields
    text = node("explain", *node.setup).stdout
    assert "missed because requirements.txt changed (was " in text
    with_key = node("explain", first[:10], *node.setup).stdout
    assert "requirements.txt changed" in with_key
    assert not (node.top / "cache" / "env").exists()  # nothing was noted


def test_what_has_expired_is_made_again(node: Node) -> None:
    made = node.ask("snapshot", *node.setup, "--env-max-age", "0.2")
    node.become_another()
    wait_until(lambda: time.time() > made["expires_s"], 5)
    found = node.ask("explain", *node.setup)
    assert not found["is_found"] and found["compared_with"] == made["key"] and not found["changes"]
    assert "it has expired" in found["lines"][0]
    assert "expired" in node("list").stdout
    assert "can be used" in node("restore", made["key"], status=1).stderr
    again = node.ask("snapshot", *node.setup)
    assert again["is_ours"] and (again["key"], again["generation"]) == (made["key"], 2)


def test_explain_says_what_is_there_and_not_trusted(node: Node) -> None:
    node("make", "--name", "ada", group="keys")
    node("snapshot", *node.setup)
    node.become_another()
    node.store.chmod(0o777)
    stranger = node.top / "stranger"
    stranger.mkdir(mode=0o700)
    found = node.ask("explain", *node.setup, environ={"BOOTSEER_KEYS": os.fspath(stranger)})
    assert not found["is_found"] and "signed by no trusted key" in found["refused"][0]
    assert any("it is not trusted" in line for line in found["lines"])
    listed = node("list", environ={"BOOTSEER_KEYS": os.fspath(stranger)}).stdout
    assert "not used: " in listed and "signed by no trusted key" in listed
    refused = node("restore", *node.setup, status=1, environ={"BOOTSEER_KEYS": os.fspath(stranger)})
    assert "that can be used" in refused.stderr and "signed by no trusted key" in refused.stderr
    assert node.version("alpha") == ""


def test_what_strangers_put_into_a_store_leads_nowhere(node: Node) -> None:
    key = node.ask("snapshot", *node.setup)["key"]
    elsewhere = node.top / "elsewhere"
    (elsewhere / "packs").mkdir(parents=True)
    (elsewhere / "packs" / ("cd" * 32)).write_bytes(b"mine")
    (node.store / "keys" / KEY).symlink_to(elsewhere)
    (node.store / "caches").mkdir()
    (node.store / "caches" / KEY).symlink_to(elsewhere)
    listed = node("list").stdout
    assert key[:16] in listed and "is a symbolic link, which an environment store must not contain" in listed
    for words in (["gc", "--older", "0", "--force"], ["caches", "gc", "--older", "0"]):
        assert KEY not in json.dumps(node.ask(*words))
        assert (elsewhere / "packs" / ("cd" * 32)).read_bytes() == b"mine"
    assert "is a symbolic link" in node("restore", KEY, status=1).stderr


def test_a_document_that_is_not_of_its_key_is_no_base(node: Node) -> None:
    key = node.ask("snapshot", *node.setup)["key"]
    path = node.store / "keys" / key / "key.json"
    path.write_bytes(path.read_bytes().replace(b'"is_venv":"true"', b'"is_venv":"false"'))
    node.become_another()
    (node.work / "requirements.txt").write_text("beta==2.0\n")
    found = node.ask("explain", *node.setup)
    assert (found["compared_with"], found["changes"]) == ("", [])
    assert "is not the document of this key" in node("explain", key, *node.setup, status=1).stderr
    done = node("restore", key)
    assert "the document of the key is not used" in done.stderr and node.version("alpha") == "1.0"


@pytest.mark.slow
def test_verify_finds_every_wrong_byte(node: Node) -> None:
    node.store.mkdir(0o755)
    assert "no usable environments" in node("verify").stdout
    key = node.ask("snapshot", *node.setup)["key"]
    good = node.ask("verify")
    assert [each["is_right"] for each in good["environments"]] == [True]
    assert "0 faults" in node("verify", key[:9]).stdout
    [pack, *_] = (node.store / "trees" / key / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    wrong = node.ask("verify", status=1)["environments"][0]
    assert not wrong["is_right"] and wrong["fault_count"] == 1 and wrong["faults"][0]["pack"].startswith("packs/")
    node.become_another()
    before = files_of(node.venv)
    failed = node("restore", *node.setup, status=1)
    assert failed.stderr.splitlines()[-1].startswith("bootseer: error: ")
    assert files_of(node.venv) == before  # nothing of it was shown
    pack.unlink()
    assert not node.ask("verify", key, status=1)["environments"][0]["is_right"]
    shutil.rmtree(node.store / "trees" / key / "index")
    assert node.ask("verify", key, status=1)["environments"][0]["error"]
    assert "has no environment of the key" in node("verify", KEY, status=1).stderr


def test_gc_takes_what_nobody_uses(node: Node) -> None:
    key = node.ask("snapshot", *node.setup)["key"]
    assert node.ask("gc")["removals"] == []
    assert node.ask("gc", "--older", "1")["removals"] == []
    kept = node("gc", "--older", "0", "--limit", "0").stdout
    assert "0 B deleted" in kept and "1 kept: they are in use or new; --force" in kept
    assert node.ask("gc", "--older", "0.0001", "--limit", "0")["recent"] == 1
    dry = node("gc", "--older", "0", "--force", "--dry-run").stdout
    assert key[:16] in dry and re.search(r"was not used for [\d.]+ s\n", dry) and "would be deleted" in dry
    assert node.ask("list")["environments"][0]["is_usable"]
    limited = node.ask("gc", "--limit", "1", "--dry-run")
    assert limited["recent"] == 1 and limited["removals"] == []  # somebody may read it at this moment
    done = node.ask("gc", "--older", "0", "--force")
    assert [each["key"] for each in done["removals"]] == [key] and done["left_bytes"] == 0
    assert node.ask("list")["environments"] == []
    assert "--limit" in node("gc", "--limit", "many", status=2).stderr


def test_rm_takes_what_is_named(node: Node) -> None:
    first = node.ask("snapshot", *node.setup)["key"]
    node.become_another()
    (node.work / "requirements.txt").write_text("beta==2.0\n")
    second = node.ask("snapshot", *node.setup)["key"]
    for words in ([first], [first[:7], second], ["--dry-run", second]):
        refused = node("rm", *words, status=1).stderr
        assert "not deleted: it was used or stored within 2 h" in refused and "--force deletes it" in refused
        assert refused.count("\n") == 1 and (first if first in words else second)[:16] in refused
    assert "has no environment of the key" in node("rm", first, KEY, "--force", status=1).stderr
    assert "has no key that begins with" in node("rm", "abcdef", status=1).stderr
    assert "is not a key" in node("rm", "some", status=1).stderr
    assert "KEY" in node("rm", status=2).stderr
    dry = node("rm", first, "--force", "--dry-run").stdout
    assert first[:16] in dry and "would be deleted" in dry
    assert {each["key"] for each in node.ask("list")["environments"]} == {first, second}, "all or none"

    for entry in [*(node.store / "keys" / first).iterdir(), *(node.store / "trees" / first).rglob("*")]:
        os.utime(entry, (time.time() - 9000, time.time() - 9000))
    env = node.store / "keys" / first / "env-000001.json"
    payload = json.loads(base64.b64decode(json.loads(env.read_text())["payload"]))
    assert time.time() - payload["created_s"] < 200, "its making is a use as well"
    assert "used or stored within 2 h" in node("rm", first, status=1).stderr
    done = node.ask("rm", first[:9], first, "--force")
    assert [each["key"] for each in done["removals"]] == [first] and done["freed_bytes"] > 0
    assert not done["is_dry_run"] and not (node.store / "keys" / first).exists()
    assert not (node.store / "trees" / first).exists()
    assert [each["key"] for each in node.ask("list")["environments"]] == [second]
    assert second[:16] in node("rm", second, "--force").stdout
    assert node.ask("list")["environments"] == []


# ---- compile caches ---------------------------------------------------------------------------------------


def write_caches(node: Node, name: str, url: str) -> str:
    """As a job that has compiled something; gives its folder on the node."""
    environ = {"BOOTSEER_CACHE": os.fspath(node.top / name)}
    caches = FirstStepCaches(KEY, environ, url=url, trust=Trust([]))
    with closing(caches):
        kernel = Path(caches.path, "inductor/ab/cone.py")
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"x = 1\n")
        os.utime(kernel, (time.time(), time.time() - 60))
        if url:
            assert caches.capture(pause=lambda _: None).generation == 1
        return caches.path


def test_first_step_caches_of_a_store(node: Node) -> None:
    node.store.mkdir(0o755)
    assert "no compile caches" in node("caches", "list").stdout
    write_caches(node, "cache", os.fspath(node.store))
    line = node("caches", "list").stdout
    assert (
        KEY[:16] in line and "generation 1, 1 file," in line and "unsigned, but only you can write there" in line
    )
    [record] = node.ask("caches", "list")["caches"]
    assert (record["key"], record["generation"], record["files"]) == (KEY, 1, 1)
    assert node.ask("caches", "gc", "--older", "1")["removed"] == []
    assert node.ask("caches", "gc", "--older", "0", "--dry-run")["removed"] == [KEY]
    assert node.ask("caches", "list")["caches"]
    assert node.ask("caches", "gc", "--older", "0")["removed"] == [KEY]
    assert node.ask("caches", "list")["caches"] == []
    assert not (node.store / "caches" / KEY).exists()


def test_first_step_caches_of_a_node(node: Node) -> None:
    assert "this node has no compile caches" in node("caches", "list", "--node").stdout
    path = write_caches(node, "cache", "")
    [record] = node.ask("caches", "list", "--node")["caches"]
    assert (record["path"], record["files"], record["is_used"]) == (path, 1, False)
    environ = {"BOOTSEER_CACHE": os.fspath(node.top / "cache")}
    with closing(FirstStepCaches(KEY, environ, trust=Trust([]))):
        assert "in use" in node("caches", "list", "--node").stdout
        assert node.ask("caches", "gc", "--node", "--older", "0", "--dry-run")["removed"] == []
        assert node.ask("caches", "gc", "--node", "--older", "0")["removed"] == []
    assert node.ask("caches", "gc", "--node", "--older", "0", "--dry-run")["removed"] == [path]
    assert os.path.isdir(path)
    assert node.ask("caches", "gc", "--node", "--older", "0")["removed"] == [path]
    assert not os.path.exists(path)
    assert "give only one" in node("caches", "gc", "--node", "--env-store", "/x", status=2).stderr


# ---- help ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["snapshot", "restore", "key", "list", "explain", "verify", "gc", "rm"])
def test_help_has_an_example(node: Node, command: str) -> None:
    assert f"bootseer env {command}" in " ".join(node(command, "--help").stdout.split()).partition("Options:")[2]


def test_help_of_the_groups(node: Node) -> None:
    assert "snapshot" in node("--help").stdout and "caches" in node("--help").stdout
    assert "bootseer env caches gc" in node("caches", "gc", "--help").stdout
    top = subprocess.run([BOOTSEER, "--help"], env=node.environ, capture_output=True, text=True, check=True)
    assert "env " in top.stdout
