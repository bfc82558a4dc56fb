"""`bootseer status`: rates, text of any answer, who is meant, and a server that no client can harm."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from launcher.agent import node_status
from launcher.agent.agent import State
from launcher.base.facts import RankFacts
from launcher.base.loop import Loop
from launcher.ranks.group import RankState
from launcher.status import command, places
from launcher.status.places import JobStatus, ask_all
from launcher.status.rates import find_rates
from launcher.status.server import MAX_CLIENTS, MAX_REQUEST_BYTES, StatusServer
from launcher.status.text import MAX_RANKS, format_status
from tests import support


def facts(at_s: float, steps: int, step_at_s: float, cpu_s: float, rank: int = 0) -> RankFacts:
    return RankFacts(rank, at_s, steps, step_at_s, -1, cpu_s, -1, "S", "")


def test_rates_are_those_of_whole_steps_however_slow() -> None:
    looks = [[facts(at_s, int(at_s // 15), at_s // 15 * 15, at_s / 2)] for at_s in range(0, 62, 2)]
    found = find_rates(looks[8:], [facts(62.0, 4, 60.0, 31.0)])[0]
    assert found.steps_per_s == 1 / 15
    assert found.cores == 0.5


@pytest.mark.parametrize(
    ("looks", "newest"),
    [
        ([], facts(9.0, 5, 8.0, 1.0)),
        ([[facts(8.9, 5, 8.0, 1.0)]], facts(9.0, 5, 8.0, 1.0)),
        ([[facts(1.0, -1, -1.0, -1.0)]], facts(9.0, 5, 8.0, 1.0)),
        ([[facts(1.0, 4, 1.0, 1.0, rank=1)]], facts(9.0, 5, 8.0, 1.0)),
    ],
)
def test_where_there_is_too_little_there_is_no_rate(looks: list[list[RankFacts]], newest: RankFacts) -> None:
    found = find_rates(looks, [newest])[0]
    assert (found.steps_per_s, found.cores) == (None, None)


STATUS = {
    "run_id": "run7",
    "script": "train.py",
    "pid": 12,
    "host": "h",
    "state": "running",
    "attempt": 1,
    "attempt_runs_s": 4000.0,
    "nodes": 2,
    "node_rank": 0,
    "world_size": 4,
    "restarts": 1,
    "most_restarts": 3,
    "waits_for": "",
    "last_end": {"attempt": 0, "reason": "rank 1 on h was ended by SIGKILL"},
    "last_page": "/logs/failure-0.txt",
    "checks": ["fail    space /data: free (0 B, limit 105 MB); delete what is no longer needed"],
    "standstill": None,
    "ranks": [
        {"rank": 0, "pid": 20, "state": "running", "process": "T", "steps": 9, "step": 108, "steps_per_s": 1.25,
         "since_step_s": 0.5, "cores": 0.98, "rss_bytes": 3 << 29},
        {"rank": 1, "pid": None, "state": "starting"},
    ],
}  # fmt: skip


def test_a_status_as_text() -> None:
    assert format_status(STATUS) == [
        "job run7: train.py (bootrun 12 on h)",
        "  attempt     1, running for 1 h 6 min",
        "  nodes       2, of which this is node rank 0; 4 ranks",
        "  restarts    1 (--max-restarts 3)",
        "  last end    attempt 0: rank 1 on h was ended by SIGKILL (/logs/failure-0.txt)",
        "  check       fail    space /data: free (0 B, limit 105 MB); delete what is no longer needed",
        "  rank  pid  state             steps  step  steps/s  last step  cores  memory",
        "  0     20   running, stopped  9      108   1.25     0.5 s ago  0.98   1.50 GiB",
        "  1     -    starting          -      -     -        -          -      -",
    ]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=40)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=9), inner, max_size=4)),
    max_leaves=10,
)
RANK = st.dictionaries(st.sampled_from([str(name) for name in STATUS["ranks"][0]]), JSON)  # type: ignore[index]


@given(st.dictionaries(st.sampled_from(sorted(STATUS)), JSON), st.lists(st.one_of(RANK, JSON), max_size=3))
def test_any_answer_is_shown_in_lines_that_do_a_terminal_no_harm(status: dict[str, Any], ranks: list[Any]) -> None:
    lines = format_status({**status, "ranks": ranks})
    assert all("\x1b" not in line and "\n" not in line for line in lines)


def test_many_ranks_are_cut() -> None:
    lines = format_status({**STATUS, "ranks": [{"rank": rank, "state": "running"} for rank in range(5000)]})
    assert len(lines) == 6 + 1 + MAX_RANKS + 1
    assert lines[-1] == f"  and {5000 - MAX_RANKS:,} more ranks here: --json lists all"


def test_which_job_is_meant() -> None:
    jobs = [
        JobStatus(str(pid), {"run_id": name, "pid": pid}, "")
        for name, pid in (("run7", 1), ("run71", 2), ("2", 3))
    ]
    silent = JobStatus("/x", None, "it does not answer")
    every = [*jobs, silent]
    assert command.choose(every, None) == every
    assert command.choose(every, "run7") == jobs[:1]
    assert command.choose(every, "run") == jobs[:2]
    assert command.choose(every, "2") == jobs[2:], "an id before a pid"
    assert command.choose(every, "1") == jobs[:1]
    assert command.choose(every, "other") == []


class Agent(NamedTuple):
    """What is asked of an agent."""

    state: State = State.WAITING
    group: Any = None
    last_stop: Any = None
    is_member: bool = True
    is_spare: bool = False


class Group(NamedTuple):
    spawn_began_ns: int
    ranks: tuple[Any, ...]


class Named(NamedTuple):
    """Anything that has one of these."""

    unready: str = ""
    step: str = ""
    is_single: bool = False
    endpoint: tuple[str, int] = ("head", 29400)
    reason: str = ""
    state: RankState = RankState.RUNNING


@pytest.mark.parametrize(
    ("agent", "unready", "is_single", "words"),
    [
        (Agent(is_member=False), "", False, "the coordinator at head:29400"),
        (Agent(is_spare=True), "", False, "a place in the job"),
        (Agent(), "the image", False, "the image"),
        (Agent(), "", False, "other nodes, or"),
        (Agent(group=Group(1, ())), "", True, "a pause before the restart"),
        (Agent(group=Group(1, ())), "the checkpoint", False, "other nodes, or"),
        (Agent(State.RUNNING, Group(0, ())), "", True, "the fork server"),
        (Agent(State.RUNNING, Group(0, ())), "the checkpoint", True, "the checkpoint"),
        (Agent(State.RUNNING, Group(1, (Named(state=RankState.STARTING),))), "", True, "ranks to start"),
        (Agent(State.RUNNING, Group(1, (Named(),))), "", True, ""),
        (Agent(State.SUCCEEDED, Group(1, ())), "", False, "other nodes: all ranks here have succeeded"),
        (
            Agent(State.STOPPING, Group(1, ()), Named(reason="rank 1 failed")),
            "",
            True,
            "ranks to end: rank 1 failed",
        ),
        (Agent(State.ENDING), "", True, "the last output"),
    ],
)
def test_what_is_waited_for_has_words(agent: Any, unready: str, is_single: bool, words: str) -> None:
    spec: Any = Named(is_single=is_single)
    around: Any = Named(unready=unready)
    found = node_status._waits_for(agent, around, spec)
    assert found.startswith(words) and bool(found) == bool(words)


def test_a_step_between_attempts_has_its_name() -> None:
    around: Any = Named(step="rollback")
    assert node_status._waits_for(Agent(), around, Named()) == "a step of the escalation ladder: rollback"


# ---- server and client ---------------------------------------------------------------------------------------


class Served:
    """A server on a loop in a thread."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.loop = Loop()
        self.fails = ""
        self.server = StatusServer(self.loop, environ, self._answer)
        self._stop = os.pipe()
        self.loop.add_reader(self._stop[0], self._end)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def _answer(self, request: str, then: Any) -> None:
        if self.fails == "later":
            self.loop.call_later(0.01, then, RuntimeError("of this answer"))
            return
        if self.fails:
            raise RuntimeError("of this answer")
        then({"run_id": "r", "pid": os.getpid(), "fill": "x" * 3_000_000})

    def _end(self) -> None:
        self.server.close()
        self.loop.stop()

    def end(self) -> None:
        os.write(self._stop[1], b"x")

    def close(self) -> None:
        self.end()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.loop.close()
        for fd in self._stop:
            os.close(fd)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"BOOTSEER_RUNTIME": str(tmp_path / ("a-long-name-" * 8) / "rt")}


@pytest.fixture
def served(environ: dict[str, str]) -> Iterator[Served]:
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    made = Served(environ)
    yield made
    made.close()


def connect(path: str) -> socket.socket:
    fd = os.open(os.path.dirname(path), os.O_PATH)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    os.close(fd)
    return connection


def test_its_names_are_reported_before_it_has_them(environ: dict[str, str]) -> None:
    """Else a job that is killed between the two would leave them."""
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    told: list[tuple[list[str], list[str]]] = []
    directory = os.path.join(environ["BOOTSEER_RUNTIME"], "jobs")
    loop = Loop()
    try:
        server = StatusServer(
            loop, environ, lambda _request, _then: None, lambda paths: told.append((paths, os.listdir(directory)))
        )
        [(paths, there)] = told
        assert (there, paths[0]) == ([], server.path)
        assert {os.path.join(directory, name) for name in os.listdir(directory)} <= set(paths)
        # While it is made it has the other name.
        assert os.path.basename(paths[1]) == f".{os.path.basename(server.path)}"
        server.close()
        assert os.listdir(directory) == []
    finally:
        loop.close()


@pytest.mark.leaks
def test_clients_of_all_sorts_cost_only_themselves(served: Served, environ: dict[str, str]) -> None:
    (found,) = ask_all(environ)
    assert found.status is not None
    assert (found.status["run_id"], len(found.status["fill"])) == ("r", 3_000_000)
    for served.fails in ("now", "later"):
        (found,) = ask_all(environ)
        assert found.status is None
        assert "of this answer" in found.why, "a failure of the answer is told to who asked"
    served.fails = ""
    for request, answer in (
        (b"no json\n", "a line of JSON"),
        (b"[" * 4000 + b"\n", "a line of JSON"),
        (b'{"do": "stop"}\n', "a request is"),
        (b"x" * MAX_REQUEST_BYTES, ""),
    ):
        with connect(served.server.path) as connection:
            connection.sendall(request)
            said = connection.makefile("rb").read()
            assert json.loads(said)["error"].find(answer) >= 0 if answer else said == b""
    waiting = [connect(served.server.path) for _ in range(MAX_CLIENTS)]
    with connect(served.server.path) as one_too_many:
        assert one_too_many.recv(1) == b""
    for each in waiting:
        each.close()
    # It is told of who has gone by its loop, maybe after it is told of who comes.
    support.wait_until(lambda: all(found.status is not None for found in ask_all(environ)), 20, "an answer")


def test_a_job_that_does_not_answer_is_named(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(places, "ANSWER_S", 0.1)
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    directory = places.prepare(environ)
    fd = os.open(directory, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"/proc/self/fd/{fd}/77-stopped")
        stopped.listen()
        (found,) = ask_all(environ)
        assert command.main(["run7"]) == 1
    os.close(fd)
    assert "running: one without an answer (its bootrun has not answered within" in capsys.readouterr().err
    assert found.status is None
    assert "has not answered within 0.1 s; it may be stopped" in found.why
    assert ask_all(environ) == [], "once it is gone"


def test_watching_goes_on_until_the_job_ends(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    monkeypatch.setenv("BOOTSEER_RUNTIME", environ["BOOTSEER_RUNTIME"])
    made = Served(environ)
    try:
        ends = threading.Timer(0.7, made.end)
        ends.start()
        assert command.main(["r", "--watch=0.1"]) == 0
        ends.join()
        said = capsys.readouterr()
        assert said.out.count("job r: -") >= 2
        assert said.err == "bootseer status: the job has ended\n"
    finally:
        made.close()


def test_watching_waits_for_the_job(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    monkeypatch.setenv("BOOTSEER_RUNTIME", environ["BOOTSEER_RUNTIME"])
    asked: list[Served] = []
    ask = command.ask_all

    def ask_all(environ: Mapping[str, str]) -> list[JobStatus]:
        found = ask(environ)
        if not asked:  # it begins after the first question
            asked.append(Served(environ))
        elif found:
            asked[0].end()
        return found

    monkeypatch.setattr(command, "ask_all", ask_all)
    try:
        assert command.main(["r", "--watch=0.1"]) == 0
    finally:
        asked[0].close()
    said = capsys.readouterr()
    assert "job r: -" in said.out
    waiting = "bootseer status: waiting for job r on this node (Ctrl-C ends this)"
    assert said.err.splitlines() == [waiting, "bootseer status: the job has ended"]


def test_the_directory_is_private_and_the_name_goes(environ: dict[str, str], served: Served) -> None:
    directory = os.path.dirname(served.server.path)
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert os.listdir(directory) == [os.path.basename(served.server.path)]


def test_what_a_killed_job_left_is_taken_away(environ: dict[str, str], tmp_path: Path) -> None:
    os.mkdir(os.path.dirname(environ["BOOTSEER_RUNTIME"]), 0o700)
    directory = places.prepare(environ)
    fd = os.open(directory, os.O_PATH)
    for name in ("77-dead", ".78-began", ".79-old"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"/proc/self/fd/{fd}/{name}")
            dead.listen()
    os.utime(f"/proc/self/fd/{fd}/.79-old", (0, 0))
    os.close(fd)
    assert ask_all(environ) == []
    assert os.listdir(directory) == [".78-began"], "on which somebody may listen in a moment"


def test_without_a_job_that_is_said_and_another_users_directory_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOOTSEER_RUNTIME", environ["BOOTSEER_RUNTIME"])
    assert command.main([]) == 1
    assert command.main(["run7"]) == 1
    assert command.main(["--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"jobs": []}
    assert "no job of this user runs on this node" in said.err
    assert "no job 'run7' runs here; running: none" in said.err
    os.makedirs(os.path.join(environ["BOOTSEER_RUNTIME"], places.JOBS))
    os.chmod(os.path.join(environ["BOOTSEER_RUNTIME"], places.JOBS), 0o777)
    with pytest.raises(ConfigError):
        ask_all(environ)
    assert command.main([]) == 1
    for argv in (["--watch", "run7"], ["--watch=0"], ["--watch=nan"]):
        with pytest.raises(SystemExit) as ended:
            command.main(argv)
        assert ended.value.code == 2
