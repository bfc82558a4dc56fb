"""The launch specification: what is made of a command line, and what is refused in one line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

import pytest

from bootseer.errors import ConfigError, UsageError
from launcher.cli.parser import parse
from launcher.spec import Entry, LaunchSpec, build_spec

SCRIPT = os.path.abspath(__file__)
OMP = {"OMP_NUM_THREADS": "1"}


def counted(kind: str, environ: Mapping[str, str]) -> int:
    return {"cpu": 6, "gpu": 3}.get(kind, 1)


def spec_of(*argv: str, **environ: str) -> LaunchSpec:
    values = {**OMP, **environ}
    return build_spec(parse(argv, values), values, counted)


def refused(*argv: str, status: int = 1, **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        spec_of(*argv, **environ)
    assert error.value.exit_status == status
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_least_command_line() -> None:
    spec = spec_of(SCRIPT, "--lr", "1")
    assert spec.entry == Entry("script", SCRIPT, ("--lr", "1"))
    assert (spec.python, spec.nproc, spec.min_nodes, spec.max_nodes) == (sys.executable, 1, 1, 1)
    assert spec.is_single and spec.backend == "c10d" and spec.master is None and spec.node_rank is None
    assert len(spec.run_id) == 36 and spec.run_id[14] == "4"
    assert spec.run_id != spec_of(SCRIPT).run_id
    assert (spec.max_restarts, spec.shutdown_timeout_s, spec.rank_hooks) == (0, 30.0, True)
    assert spec.signals_to_handle == (15, 2, 1, 3)
    assert spec.forward_signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert spec.warnings == ()


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((), "script"), (("-m",), "module"), (("--no-python",), "program"), (("--run-path",), "run-path")],
)
def test_what_ranks_run(flags: tuple[str, ...], mode: str) -> None:
    assert spec_of(*flags, SCRIPT, "a").entry == Entry(mode, SCRIPT, ("a",))


def test_run_path_wins_over_no_python() -> None:
    assert spec_of("--run-path", "--no-python", SCRIPT).entry.mode == "run-path"


def test_scripts_that_cannot_be_looked_for() -> None:
    assert spec_of("-").entry.target == "-"
    assert spec_of("train_${local_rank}.py").entry.target == "train_${local_rank}.py"


@pytest.mark.parametrize(("text", "count"), [("4", 4), ("cpu", 6), ("gpu", 3), (" 2 ", 2)])
def test_ranks_on_this_node(text: str, count: int) -> None:
    assert spec_of("--nproc-per-node", text, SCRIPT).nproc == count


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        (("--nnodes", "1:2:3"), "1:2:3"),
        (("--nnodes", "x"), "'x'"),
        (("--nproc-per-node", "0"), "--nproc-per-node 0"),
        (("--nproc-per-node", "-2"), "--nproc-per-node -2"),
        (("--nproc-per-node", "many"), "many"),
        (("--max-restarts", "-1"), "--max-restarts -1"),
        (("--monitor-interval", "0"), "--monitor-interval 0"),
        (("--monitor-interval", "nan"), "--monitor-interval nan"),
        (("--event-log-handler", "mine"), "mine"),
        (("--no-python", "-m"), "--no-python and --module"),
        (("--nnodes", "2:1"), "'2:1'"),
        (("--nnodes", "2", "--node-rank", "2"), "--node-rank 2"),
        (("--nnodes", "2", "--rdzv-endpoint", "head:x"), "'head:x'"),
        (("--rdzv-conf", "a=1,rest"), "'rest'"),
        (("--rdzv-conf", "is_host=maybe"), "is_host=maybe"),
        (("--rdzv-conf", "port_range=9-1"), "port_range=9-1"),
        (("--rdzv-conf", "join_timeout=soon"), "join_timeout=soon"),
        (("--shutdown-timeout", "-1"), "--shutdown-timeout -1"),
        (("--redirects", "4"), "--redirects '4'"),
        (("--tee", "x:1"), "--tee"),
        (("--local-ranks-filter", "a"), "--local-ranks-filter"),
    ],
)
def test_what_torchrun_raises_is_one_line_with_status_1(argv: tuple[str, ...], culprit: str) -> None:
    assert culprit in refused(*argv, SCRIPT)


@pytest.mark.parametrize(
    ("argv", "culprit"),
    [
        (("--rdzv-backend", "etcd"), "use c10d"),
        (("--rdzv-backend", "etcd-v2"), "use c10d"),
        (("--rdzv-backend", "mine"), "'mine'"),
        (("--logs-specs", "mine"), "use --redirects"),
        (("--restart-refill", "-1"), "--restart-refill -1"),
        (("--restart-backoff", "nan"), "--restart-backoff nan"),
        (("--forward-signals", "SIGNONE"), "SIGNONE"),
    ],
)
def test_usage_errors(argv: tuple[str, ...], culprit: str) -> None:
    assert culprit in refused(*argv, SCRIPT, status=UsageError.exit_status)


def test_missing_files() -> None:
    assert "'none-such.py' does not exist" in refused("none-such.py")
    assert "absolute" in refused("--run-path", "relative.py")


def test_devices_are_checked_before_anything_runs() -> None:
    argv = ("--virtual-local-rank", "--nproc-per-node", "3", SCRIPT)
    assert "local rank 2" in refused(*argv, CUDA_VISIBLE_DEVICES="4,5")
    assert spec_of(*argv, CUDA_VISIBLE_DEVICES="4,5,6").virtual_local_rank
    assert "numactl" in refused("--numa-binding", "node", SCRIPT, PATH="")


def test_threads_of_several_ranks() -> None:
    args = parse(["--nproc-per-node", "2", SCRIPT], {})
    assert "OMP_NUM_THREADS" in build_spec(args, {}).warnings[0]
    assert build_spec(args, OMP).warnings == ()


@pytest.mark.parametrize("flag", ["--rank-hooks", "--on-hang"])
def test_collectives_are_traced_only_where_somebody_looks(flag: str) -> None:
    assert spec_of("--trace-collectives", SCRIPT).trace_collectives
    (warning,) = spec_of("--trace-collectives", flag, "off", SCRIPT).warnings
    assert f"{flag} off" in warning


def test_the_interpreter_of_ranks() -> None:
    assert spec_of(SCRIPT, PYTHON_EXEC="/opt/python").python == "/opt/python"
    assert spec_of(SCRIPT, PYTHON_EXEC="").python == sys.executable


def test_conf_with_quotes_left_in() -> None:
    text = "'join_timeout=5,close_timeout=5,timeout=5'"
    spec = spec_of("--rdzv-conf", text, SCRIPT)
    assert spec.conf == {"'join_timeout": "5", "close_timeout": "5", "timeout": "5'"}
    assert spec.join_timeout_s == 600.0  # the key in quotes is not this one, and the last is never read
    assert "timeout=5'" in refused("--rdzv-conf", text, "--nnodes=2", SCRIPT)  # static reads it, as in torchrun


def test_conf() -> None:
    conf = "join_timeout=7,is_host=no,port_range=30000-30100,keep_alive_interval=2,keep_alive_max_attempt=4,x=y"
    spec = spec_of("--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:7", "--rdzv-conf", conf, SCRIPT)
    assert (spec.backend, spec.endpoint, spec.run_id, spec.is_single) == ("c10d", ("::1", 7), "none", False)
    assert (spec.join_timeout_s, spec.keep_alive_interval_s, spec.keep_alive_max_attempt) == (7.0, 2.0, 4)
    assert (spec.is_host, spec.port_range) == (False, (30000, 30100))


def test_static() -> None:
    spec = spec_of("--nnodes=2", "--node-rank=1", "--master-addr=head", "--master-port=7", SCRIPT)
    assert (spec.backend, spec.endpoint, spec.master, spec.node_rank) == ("static", ("head", 7), ("head", 7), 1)
    assert spec.job_rules().static and spec.join_timeout_s == 900.0


def test_how_long_ranks_may_take_to_end() -> None:
    assert spec_of("--shutdown-timeout=7", SCRIPT, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="9").shutdown_timeout_s == 7
    assert spec_of(SCRIPT, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="9").shutdown_timeout_s == 9
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=-3" in refused(SCRIPT, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="-3")


def test_signals() -> None:
    spec = spec_of("--signals-to-handle", "SIGTERM, SIGUSR1,SIGNONE,SIGKILL,SIGTERM", SCRIPT)
    assert spec.signals_to_handle == (signal.SIGTERM, signal.SIGUSR1)
    assert spec.forward_signals == (signal.SIGUSR2,)
    assert spec.signals_text == "SIGTERM, SIGUSR1,SIGNONE,SIGKILL,SIGTERM"
    assert ["SIGNONE" in spec.warnings[0], "SIGKILL" in spec.warnings[1]] == [True, True]
    assert spec_of("--forward-signals", "", SCRIPT).forward_signals == ()


def test_the_rules_of_the_job() -> None:
    rules = spec_of(
        "--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=head", "--rdzv-id=j", "--max-restarts=3",
        "--restart-backoff=0", "--restart-refill=60", "--rdzv-conf=last_call_timeout=5", SCRIPT,
    ).job_rules()  # fmt: skip
    assert (rules.run_id, rules.min_nodes, rules.max_nodes, rules.static) == ("j", 2, 4, False)
    assert (rules.max_restarts, rules.backoff_s, rules.restart_refill_s, rules.last_call_s) == (3, 0.0, 60.0, 5.0)
