"""The network between nodes measured before a restart: real jobs of several nodes, one with a slow link."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import netns
from tests.support import BOOTRUN, clean_environ, lacking, python, wait_until

# This host may be busy with anything: nothing of it is slow.
ANY_NETWORK = [
    word for limit in ("slow_share=0", "late_s=5", "lost_share=1") for word in ("--check-limit", f"pair_{limit}")
]
# The first attempt fails by what is the network's matter; the second ends well.
FAILS = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise RuntimeError("NCCL error: ncclSystemError: NET/IB : Got completion from peer with status=12 error")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import time
    time.sleep(600)
print("world", os.environ["WORLD_SIZE"])
"""


def events_of(directory: Path, name: str) -> list[dict]:
    lines = [line for path in directory.rglob("agent-*") for line in path.read_text().splitlines()]
    return [event for line in lines if (event := json.loads(line)).get("name") == name]


@pytest.mark.parametrize("secret", [None, "0123456789abcdef"])
def test_nodes_measure_each_other_after_a_failure_of_the_network(
    program, script, free_port: int, tmp_path: Path, secret: str | None
) -> None:
    nodes = [
        program.start(
            *(BOOTRUN, "--nnodes", 3, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"),
            *(
                "--rdzv-id",
                "job",
                "--max-restarts",
                1,
                "--restart-backoff",
                0,
                "--log-dir",
                tmp_path / f"node{node}",
            ),
            *("-r", "3", *ANY_NETWORK, script(FAILS)),
            env={"BOOTSEER_SECRET": secret},
        )
        for node in range(3)
    ]
    runs = [node.wait() for node in nodes]
    assert [run.status for run in runs] == [0, 0, 0], runs[0].stderr
    for run in runs:
        assert "check: ok      pairs: 3 nodes, 3 links, " in run.stderr, run.stderr
    pages = [page.read_text() for page in tmp_path.rglob("failure-0.txt")]
    assert len(pages) == 1 and "check      ok      pairs: 3 nodes, 3 links" in pages[0]


# bootrun on a node whose wall clock is ahead.
AHEAD = """
import sys, time
from launcher.__main__ import bootrun
right_ns = time.time_ns
time.time_ns = lambda: right_ns() + 30 * 10**9
sys.exit(bootrun())
"""


def test_a_node_with_another_wall_clock_is_named(program, script, free_port: int, tmp_path: Path) -> None:
    ahead = script(AHEAD, "ahead.py")
    ends = script(
        "import os, sys, time\nend_s = time.monotonic() + 60\n"
        "while time.monotonic() < end_s and not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n"
    )
    nodes = [
        program.start(
            *(python(ahead) if node == 1 else [BOOTRUN]),
            *("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"),
            *("--check", "report", "--check-every", 0, "--log-dir", tmp_path / f"node{node}", "-r", 3),
            *(ends, tmp_path / "end"),
        )
        for node in range(2)
    ]
    wait_until(lambda: all("clock-skew" in node.stderr for node in nodes), 30, "the clocks are compared")
    (tmp_path / "end").touch()
    runs = [node.wait() for node in nodes]
    assert [run.status for run in runs] == [0, 0]
    for run in runs:
        (line,) = [line for line in run.stderr.splitlines() if "clock-skew" in line]
        assert "warn    clock-skew" in line and "their clocks differ by (30 s, limit 0.5 s)" in line
    (found,) = [each for each in events_of(tmp_path, "check") if each["attrs"]["check"] == "clock-skew"]
    assert found["attrs"]["measured"] == pytest.approx(30, abs=0.5)


@pytest.fixture
def four_hosts() -> Iterator[netns.Hosts]:
    reason = netns.why_not()
    if reason:
        lacking(reason)
    with netns.Hosts(4) as made:
        yield made


@pytest.mark.system
@pytest.mark.slow
def test_the_node_with_a_slow_link_is_named_and_left_out(four_hosts: netns.Hosts, script, tmp_path: Path) -> None:
    slow = four_hosts.hosts[2]
    netns.shape([slow], 1e6, "32kb")
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    secret.chmod(0o600)
    environ = {**clean_environ(), "BOOTSEER_SECRET_FILE": os.fspath(secret)}
    jobs = [
        host.start(
            [
                *(BOOTRUN, "--nnodes", "3:4", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
                *("--rdzv-endpoint", f"{four_hosts.hosts[0].address}:29511", "--max-restarts", "1"),
                *("--restart-backoff", "0", "--log-dir", os.fspath(tmp_path / host.name), "-r", "3"),
                *("--rdzv-conf", "last_call_timeout=20"),
                # This host may be busy: the slow link has 1 MB/s, and nothing else is as slow.
                *("--check-limit", "pair_enough_bytes_per_s=20e6", script(FAILS)),
            ],
            environ,
            os.fspath(tmp_path / f"{host.name}.out"),
            cwd=os.fspath(tmp_path),
        )
        for host in four_hosts.hosts
    ]
    said = [tmp_path / f"{host.name}.out" for host in four_hosts.hosts]
    wait_until(lambda: all(job.poll() is not None for job in jobs), 60, "the job ends")
    text = said[0].read_text()
    assert [job.returncode for job in jobs] == [0, 0, 0, 0], text
    assert f"check: fail    pairs {slow.name}: slow with 3 of 3 nodes" in text, text
    assert f"{slow.name} is left out of further attempts" in text
    assert not [line for line in text.splitlines() if "check: " in line and slow.name not in line], text
    assert "3 ranks on 3 nodes" in text
    found = events_of(tmp_path, "check")
    assert [(event["attrs"]["check"], event["attrs"]["where"]) for event in found] == [("pairs", slow.name)]
