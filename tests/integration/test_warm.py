"""`bootseer warm` as people run it: what it brings the next start takes, and nothing of it is fetched again."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.mounts.tree_daemon.mount import unmount_tree
from bootseer.own_module import command_of
from tests import support
from tests.integration.mounted_trees import need_mounts
from tests.integration.setup_jobs import Machine, agent_events, services_end, setup_span
from tests.integration.test_materialise_user import USER, User
from tests.support import lacking, wait_until
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
UNPACK = ("--env-way", "there,unpack")
MOUNT = ("--env-way", "mount")
DEADLINE_S = 90.0


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "node")
    machine.environ["BOOTSEER_RUNTIME"] = os.fspath(tmp_path / "run")
    machine.environ["BOOTSEER_KEYS"] = os.fspath(tmp_path / "keys")
    yield machine
    services_end()


@pytest.fixture
def publish(machine: Machine, bootrun: support.Programs, tmp_path: Path) -> Callable[..., None]:
    """Has a first start put the environment into the store, and makes the machine a fresh one again."""

    def publish(*flags: str) -> None:
        argv = machine.flags("--log-dir", os.fspath(tmp_path / "first"), *UNPACK, *flags)
        done = start_job(machine, bootrun, *argv)
        assert done.status == 0, done.stderr
        services_end()
        machine.renew()

    return publish


def start_job(machine: Machine, bootrun: support.Programs, *flags: str) -> support.Run:
    """In the machine's folder, as `warm`: files there are known by their names in the working folder."""
    cwd = os.fspath(machine.folder)
    return bootrun(*flags, machine.script, env=machine.environ, cwd=cwd, deadline_s=DEADLINE_S)


def start_warm(machine: Machine, *words: object) -> subprocess.Popen[str]:
    environ = {**support.clean_environ(), **{name: text for name, text in machine.environ.items() if text}}
    return subprocess.Popen(
        [BOOTSEER, "warm", *map(str, words)],
        env=environ,
        cwd=machine.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def warm(machine: Machine, *words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    process = start_warm(machine, *words)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, (words, out[-2000:], err[-2000:])
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stages(machine: Machine, *words: object, status: int = 0) -> dict[str, dict[str, Any]]:
    found = json.loads(warm(machine, *words, "--json", *_script(machine), status=status).stdout)
    return {each["stage"]: each for each in found["stages"]}


def _script(machine: Machine) -> list[str]:
    return [os.fspath(machine.script)]


def flags(machine: Machine, *more: str, **options: bool) -> list[str]:
    return [*machine.flags(*more, **options)][1:]  # without --standalone: also as it is written in a job file


# ---- environments --------------------------------------------------------------------------------------------


def test_a_mounted_start_fetches_nothing_of_a_warmed_environment(
    machine: Machine, publish: Callable[..., None], bootrun: support.Programs, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", str(machine.environ["BOOTSEER_RUNTIME"]))
    publish()
    first = stages(machine, *flags(machine, *MOUNT))["env"]
    assert first["how"] == "cached", first
    assert first["fetched_bytes"] == first["size_bytes"] > 0
    again = stages(machine, *flags(machine, *MOUNT))["env"]
    assert again["fetched_bytes"] == 0 and again["what"] == first["what"]
    for packs in machine.store.rglob("packs"):
        shutil.rmtree(packs)  # nobody can read a block of it any more
    logs = tmp_path / "logs"
    done = start_job(machine, bootrun, *machine.flags("--log-dir", os.fspath(logs), *MOUNT))
    span = setup_span(logs)
    assert unmount_tree(str(span.attrs["tree"]), force=True)
    assert done.status == 0, done.stderr
    assert "has 1.0" in done.stdout
    assert (span.attrs["how"], span.attrs["tree"]) == ("mount", first["what"])
    (told,) = [event for event in agent_events(logs) if event.name == "warmed"]
    assert (told.stage, told.attrs["what"], told.attrs["how"]) == ("env", first["what"], "cached")
    assert 0 <= float(str(told.attrs["age_s"])) < DEADLINE_S


def test_where_nothing_is_mounted_the_environment_is_unpacked_before(
    machine: Machine, publish: Callable[..., None], bootrun: support.Programs, tmp_path: Path
) -> None:
    publish()
    assert stages(machine, *flags(machine, *UNPACK))["env"]["how"] == "unpacked"
    assert subprocess.run([machine.venv / "bin" / "small"], capture_output=True, text=True).stdout == "1.0\n"
    assert stages(machine, *flags(machine, *UNPACK))["env"]["how"] == "there"
    argv = machine.flags("--log-dir", os.fspath(tmp_path / "logs"), *UNPACK)
    done = start_job(machine, bootrun, *argv)
    assert done.status == 0, done.stderr
    assert setup_span(tmp_path / "logs").attrs["how"] == "there"
    assert machine.count() == 1, "set-up did not run again"


def test_what_the_store_does_not_have_is_left_to_the_first_start(machine: Machine) -> None:
    done = warm(machine, *flags(machine, *UNPACK), *_script(machine))
    assert done.stdout == "env: the store does not have it: the first start builds it\n"
    assert machine.count() == 0, "set-up is the job's business"


def test_more_than_is_allowed_is_not_fetched(machine: Machine, publish: Callable[..., None]) -> None:
    publish()
    found = stages(machine, "--most", "100", *flags(machine, *UNPACK), status=1)["env"]
    assert found["how"] == "failed" and "only 100 are allowed" in found["text"]
    assert not list((machine.venv / "lib").rglob("small*"))


def test_a_rate_is_kept(machine: Machine, publish: Callable[..., None]) -> None:
    publish()
    size = stages(machine, *flags(machine, *UNPACK))["env"]
    machine.renew()
    whole = stages(machine, "--rate", "1GB", *flags(machine, *UNPACK))["env"]
    assert whole["how"] == "unpacked" and whole["size_bytes"] > 0, size
    machine.renew()
    began_s = time.monotonic()
    # The first piece goes at once; the others wait their turn.
    slow = stages(machine, "--rate", str(whole["size_bytes"] * 2), *flags(machine, *UNPACK))["env"]
    assert slow["fetched_bytes"] == whole["size_bytes"]
    assert time.monotonic() - began_s >= slow["took_s"] >= 0


def test_first_step_caches_are_seeded(
    machine: Machine, publish: Callable[..., None], bootrun: support.Programs, tmp_path: Path
) -> None:
    kernels = machine.folder / "kernels"
    machine.script.write_text(f"import os\nos.makedirs('{kernels}', exist_ok=True)\n"
                              f"open('{kernels}/a.bin', 'w').write('compiled' * 1000)\n")  # fmt: skip
    caches = ("--keep-caches", "--cache-dir", f"mine={kernels}")
    plain = ["--env-store", os.fspath(machine.store), *caches]
    done = start_job(machine, bootrun, "--standalone", *plain)
    assert done.status == 0, done.stderr
    services_end()
    shutil.rmtree(kernels)
    shutil.rmtree(machine.folder / "cache")
    found = stages(machine, *plain)["caches"]
    assert (found["how"], found["fetched_bytes"]) == ("seeded", 8000), found
    assert (kernels / "a.bin").read_text() == "compiled" * 1000


def test_a_store_that_is_gone_fails_its_stage_alone(machine: Machine, publish: Callable[..., None]) -> None:
    publish()
    for packs in machine.store.rglob("packs"):
        shutil.rmtree(packs)
    found = stages(machine, "--rate", "1GB", *flags(machine, *UNPACK, keeps_caches=True), status=1)
    assert found["env"]["how"] == "failed"
    assert found["caches"]["how"] == "nothing", "they depend on the environment"


def test_nothing_to_warm_is_a_mistake(machine: Machine) -> None:
    assert "nothing to warm" in warm(machine, *_script(machine), status=2).stderr


def test_a_worker_whose_daemon_is_gone_ends_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    order = {"name": "a.toml", "text": "[nonsense]\n", "owner": None}
    command = command_of("launcher.warm.worker")
    done = subprocess.run(command, input=json.dumps(order), stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


# ---- images --------------------------------------------------------------------------------------------------


def test_an_image_that_nobody_recorded_is_opened_faster_all_the_same(machine: Machine, tmp_path: Path) -> None:
    need_mounts()
    source = tmp_path / "image"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "python3").write_bytes(os.urandom(300_000))
    environ = {**support.clean_environ(), **{name: text for name, text in machine.environ.items() if text}}
    subprocess.run(
        [BOOTSEER, "image", "build", f"rootfs:{source}", tmp_path / "tree", "--unsigned"],
        env=environ, check=True, capture_output=True,
    )  # fmt: skip
    found = json.loads(warm(machine, "--image", tmp_path / "tree", "--json").stdout)
    assert found["script"] == ""
    (image,) = found["stages"]
    assert (image["how"], image["size_bytes"]) == ("cached", 0)
    assert "no access trace yet" in image["text"]
    cached = machine.folder / "cache" / "trees" / image["what"]
    assert list(cached.glob("erofs-*")), "what a mount reads is there"


# ---- checkpoints ---------------------------------------------------------------------------------------------

LOADS = """
import hashlib, os
with open(os.environ["BOOTSEER_CHECKPOINT"], "rb") as file:
    print("loaded", hashlib.sha256(file.read()).hexdigest(), flush=True)
"""


def test_a_job_takes_over_a_checkpoint_that_is_held(machine: Machine, bootrun: support.Programs) -> None:
    data = os.urandom(40 << 20)
    machine.script.write_text(LOADS)
    with FaultyHttpServer({"model.bin": data}) as server:
        flags = ("--load-checkpoint", server.url_of("model.bin"), "--checkpoint-memory", "200MB")
        sandbox = start_warm(machine, "--hold", 60, *flags, machine.script)
        try:
            assert sandbox.stdout is not None
            assert sandbox.stdout.readline().startswith("checkpoint: held, 41.9 MB")
            before = server.served_bytes["model.bin"]
            done = start_job(machine, bootrun, "--standalone", *flags)
            assert done.status == 0, done.stderr
            assert f"loaded {hashlib.sha256(data).hexdigest()}" in done.stdout
            assert "was in this node's memory already" in done.stderr
            assert server.served_bytes["model.bin"] - before < 1 << 20, "only what tells which version it is"
            _, err = sandbox.communicate(timeout=30)
            assert sandbox.returncode == 0 and "a job has taken the checkpoint" in err
        finally:
            sandbox.kill()
            sandbox.communicate()


def test_nobody_takes_another_version(machine: Machine, bootrun: support.Programs) -> None:
    machine.script.write_text(LOADS)
    old, new = os.urandom(1 << 20), os.urandom(1 << 20)
    with FaultyHttpServer({"model.bin": old}) as server:
        flags = ("--load-checkpoint", server.url_of("model.bin"), "--checkpoint-memory", "200MB")
        sandbox = start_warm(machine, "--hold", 60, *flags, machine.script)
        try:
            assert sandbox.stdout is not None
            assert sandbox.stdout.readline().startswith("checkpoint: held")
            server.files["model.bin"] = memoryview(new)
            server.change("model.bin")
            done = start_job(machine, bootrun, "--standalone", *flags)
            assert f"loaded {hashlib.sha256(new).hexdigest()}" in done.stdout, done.stderr
            sandbox.send_signal(signal.SIGTERM)
            assert sandbox.wait(30) == 0
        finally:
            sandbox.kill()
            sandbox.communicate()


def test_without_hold_a_checkpoint_is_left_where_it_is(machine: Machine) -> None:
    found = stages(machine, "--load-checkpoint", "/nowhere")["checkpoint"]
    assert (found["how"], found["text"]) == (
        "nothing",
        "not loaded: --checkpoint-disk keeps it on this node's disk, --hold in memory",
    )
    found = stages(machine, "--hold", 5, "--load-checkpoint", "/nowhere")["checkpoint"]
    assert (found["how"], found["text"]) == ("nothing", "there is no checkpoint yet")


# ---- job files -----------------------------------------------------------------------------------------------


def job_file(machine: Machine, jobs: Path, name: str = "a.toml", **more: str) -> Path:
    jobs.mkdir(exist_ok=True)
    words = json.dumps([*flags(machine, *UNPACK), os.fspath(machine.script)])
    lines = ["[job]", f'folder = "{machine.folder}"', f"command = {words}"]
    lines += [f'{key} = "{value}"' for key, value in more.items()]
    path = jobs / name
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o644)
    return path


def test_job_files_are_worked_on_once(machine: Machine, publish: Callable[..., None], tmp_path: Path) -> None:
    publish()
    jobs = tmp_path / "jobs"
    job_file(machine, jobs)
    (jobs / "b.toml").write_text("[images]\n")
    job_file(machine, jobs, "c.toml").chmod(0o666)
    job_file(machine, jobs, "d.toml").write_text('[job]\ncommand = ["--imagine"]\n')
    done = warm(machine, "--jobs", jobs, "--once", status=1)
    assert "a.toml: env: unpacked" in done.stderr
    assert "b.toml: b.toml:1: unknown table [images]" in done.stderr
    assert "c.toml: refused: others can write to it" in done.stderr
    assert "d.toml: d.toml: [job] command: not a valid command line of bootrun" in done.stderr
    assert subprocess.run([machine.venv / "bin" / "small"], capture_output=True, text=True).stdout == "1.0\n"
    assert "no `bootseer warm --jobs`" in warm(machine, "--status", status=1).stderr, "it has ended"


def test_a_daemon_takes_files_that_come_and_ends_by_a_signal(
    machine: Machine, publish: Callable[..., None], tmp_path: Path
) -> None:
    publish()
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    daemon = start_warm(machine, "--jobs", jobs)
    try:
        status = Path(str(machine.environ["BOOTSEER_RUNTIME"])) / "warm.json"
        wait_until(status.exists, 30, "the daemon")
        assert "another" in warm(machine, "--jobs", jobs, status=1).stderr
        job_file(machine, jobs)
        wait_until(lambda: "env unpacked" in warm(machine, "--status").stdout, 60, "the job file")
        record = json.loads(warm(machine, "--status", "--json").stdout)
        assert [each["name"] for each in record["files"]] == ["a.toml"]
        assert record["pid"] == daemon.pid
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(30) == 0
        assert not status.exists()
    finally:
        daemon.kill()
        daemon.communicate()


def test_a_daemon_reads_what_it_holds_once(machine: Machine, tmp_path: Path) -> None:
    """Each round takes the memory of the last one over; a newer version is read when nobody holds the old one."""
    old, new = os.urandom(8 << 20), os.urandom(8 << 20)
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    with FaultyHttpServer({"model.bin": old}) as server:
        words = ["--load-checkpoint", server.url_of("model.bin"), "--checkpoint-memory", "12MiB"]
        path = jobs / "a.toml"
        path.write_text(f"[job]\ncommand = {json.dumps([*words, os.fspath(machine.script)])}\n")
        path.chmod(0o644)
        daemon = start_warm(machine, "--jobs", jobs, "--hold", 60, "--every", 1)

        def stage() -> tuple[str, int]:
            found = json.loads(warm(machine, "--status", "--json").stdout)["files"][0]
            (each,) = found["stages"] or ({"how": "", "fetched_bytes": -1},)
            return each["how"], each["fetched_bytes"]

        try:
            status = Path(str(machine.environ["BOOTSEER_RUNTIME"])) / "warm.json"
            wait_until(status.exists, 30, "the daemon")
            wait_until(lambda: stage() == ("held", 0), 60, "a round that takes over what the first one holds")
            served = server.served_bytes["model.bin"]
            assert served < 1.5 * len(old), "read once"
            server.files["model.bin"] = memoryview(new)
            server.change("model.bin")
            wait_until(lambda: server.served_bytes["model.bin"] >= served + len(new), 60, "the newer version")
            wait_until(lambda: stage() == ("held", 0), 60, "a round that takes over the newer one")
            assert server.served_bytes["model.bin"] < served + 1.5 * len(new)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate(timeout=30)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_works_on_when_the_daemon_has_gone(
    machine: Machine, publish: Callable[..., None], tmp_path: Path, signum: signal.Signals
) -> None:
    publish()
    jobs, hangs = tmp_path / "jobs", tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")  # as an interpreter that is asked what it is
    hangs.chmod(0o755)
    job_file(machine, jobs, python=os.fspath(hangs))
    daemon = start_warm(machine, "--jobs", jobs)
    try:
        wait_until(lambda: len(working()) == 2, 30, "the worker, and what it has started")
        daemon.send_signal(signum)
        daemon.wait(30)
        wait_until(lambda: not working(), 30, "their end")
    finally:
        daemon.kill()
        daemon.communicate()


def working() -> list[support.Process]:
    """Workers, and the interpreter that hangs."""
    found = support.marked_processes(os.environ[support.MARK])
    return [each for each in found if "warm.worker" in each.command or "sleep 1000" in each.command]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[User]:
    if os.geteuid():
        lacking("another user is made by root")
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & 1:
            directory.chmod(directory.stat().st_mode | 0o711)  # of pytest's own
    user = User(tmp_path)
    yield user
    user.close()


def test_root_works_on_a_file_as_its_owner(other: User, tmp_path: Path) -> None:
    """Interpreters of the user are run as that user, without groups or capabilities of root."""
    entry = pwd.getpwuid(USER)
    told, python, jobs = other.home / "told", other.home / "python", tmp_path / "jobs"
    python.write_text(
        f"#!/bin/sh\n(id -u; id -G; grep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status; env) > {told}\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    os.chown(python, USER, USER)
    jobs.mkdir()
    words = ["--setup", "true", "--setup-target", f"{other.home}/target", "--env-store", f"{other.home}/store"]
    path = jobs / "a.toml"
    path.write_text(
        f'[job]\nfolder = "{other.home}"\npython = "{python}"\ncommand = {json.dumps([*words, "x.py"])}\n'
    )
    os.chown(path, USER, USER)
    for made in ("store", "target"):
        (other.home / made).mkdir()
        os.chown(other.home / made, USER, USER)
    (other.home / "x.py").write_text("")
    daemon = other.as_root(
        BOOTSEER, "warm", "--jobs", os.fspath(jobs), "--once",
        BOOTSEER_RUNTIME=os.fspath(tmp_path / "run"),
    )  # fmt: skip
    done = daemon.wait(DEADLINE_S)
    assert done.status == 0, done.stderr
    assert "the store does not have it" in done.stderr
    lines = told.read_text().splitlines()
    assert lines[0] == str(USER)
    assert "0" not in lines[1].split()
    capabilities = {name: value for name, _, value in (each.partition(":\t") for each in lines[2:5])}
    assert int(capabilities["CapEff"], 16) == int(capabilities["CapPrm"], 16) == 0
    assert capabilities["NoNewPrivs"] == "1"
    environ = dict(each.partition("=")[::2] for each in lines[5:])
    assert environ["HOME"] == entry.pw_dir
    assert "BOOTSEER_RUNTIME" not in environ, "the daemon's own settings are not the user's"


def test_a_user_who_cannot_read_bootseer_is_reported_so(other: User, tmp_path: Path) -> None:
    if os.access("/", os.R_OK) and not any(not each.stat().st_mode & 1 for each in Path(sys.base_prefix).parents):
        pytest.skip("everybody can read this Python")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "a.toml").write_text("[env]\nstore = '/x'\n")
    os.chown(jobs / "a.toml", USER, USER)
    environ = {**support.clean_environ(), "BOOTSEER_RUNTIME": os.fspath(tmp_path / "run")}
    argv = [BOOTSEER, "warm", "--jobs", os.fspath(jobs), "--once"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "cannot read" in done.stderr and "where all users can read" in done.stderr
    assert "Traceback" not in done.stderr
