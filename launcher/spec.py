"""What the user asked for, parsed once and frozen: command line and variables in, LaunchSpec out.

Every mistake is found here, before anything runs, and said in one line. Exit status 2 where argparse gives it or
the flag is ours; 1 where torchrun raises an exception.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import ConfigError, UsageError
from launcher.flags import NotGiven
from launcher.ranks import logs

if TYPE_CHECKING:
    from launcher.job import JobRules

C10D_PORT = 29400
STATIC_PORT = 29500
GRACE_S = 30.0
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_PROTECTED = ("SIGKILL", "SIGSTOP", "SIGCHLD")


class Entry(NamedTuple):
    """What each rank runs."""

    mode: str  # script | module | run-path | program
    target: str
    args: tuple[str, ...]


class LaunchSpec(NamedTuple):
    """A parsed and checked command line."""

    entry: Entry
    python: str
    nproc: int  # ranks on this node
    min_nodes: int
    max_nodes: int
    is_single: bool  # one node without an endpoint: no networking
    backend: str  # static | c10d
    endpoint: tuple[str, int]
    run_id: str
    conf: Mapping[str, str]
    node_rank: int | None  # None: not given
    master: tuple[str, int] | None  # given by the user, None: ours to choose
    local_addr: str
    role: str
    max_restarts: int
    redirects: logs.Masks
    tee: logs.Masks
    local_ranks_filter: frozenset[int]
    stdout_filters: tuple[str, ...]
    stderr_filters: tuple[str, ...]
    log_dir: str | None
    log_line_prefix_template: str | None
    event_log_handler: str
    numa_binding: str | None
    virtual_local_rank: bool
    signals_to_handle: tuple[int, ...]
    signals_text: str  # as given: TORCHELASTIC_SIGNALS_TO_HANDLE
    forward_signals: tuple[int, ...]
    signal_scope: str
    shutdown_timeout_s: float
    rank_hooks: bool
    allow_mixed: bool
    restart_refill_s: float | None
    restart_backoff_s: float
    events_dir: str | None
    quiet: bool
    join_timeout_s: float
    last_call_s: float
    keep_alive_interval_s: float
    keep_alive_max_attempt: int
    is_host: bool | None
    port_range: tuple[int, int] | None
    max_membership_changes: int
    warnings: tuple[str, ...]

    def job_rules(self) -> JobRules:
        """What the job's brain needs of it."""
        from launcher.job import JobRules

        static = self.backend == "static"
        return JobRules(
            run_id=self.run_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            static=static and not self.is_single,
            master=self.master,
            max_restarts=self.max_restarts,
            max_membership_changes=self.max_membership_changes,
            grace_s=self.shutdown_timeout_s,
            join_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            backoff_s=self.restart_backoff_s,
            restart_refill_s=self.restart_refill_s,
            allow_mixed=self.allow_mixed,
            frees_endpoint=static and not self.is_single,
        )


def parse_min_max_nnodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(f"--nnodes {text!r}: give a number of nodes or MIN:MAX, as in 2 or 1:4")
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        raise ConfigError(f"--nnodes {text!r}: the least must be at least 1 and not more than the most")
    return low, high


def build_spec(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    count_devices: Callable[[str, Mapping[str, str]], int] | None = None,
) -> LaunchSpec:
    """Checks a parsed command line; `count_devices` answers for cpu, gpu, xpu and auto."""
    warnings: list[str] = []
    low, high = parse_min_max_nnodes(args.nnodes)
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: must not be negative")
    if args.monitor_interval <= 0:
        raise ConfigError(f"--monitor-interval {args.monitor_interval:g}: must be more than 0")
    if args.event_log_handler not in ("null", "console"):
        raise ConfigError(f"--event-log-handler {args.event_log_handler!r}: there are null and console")
    if args.logs_specs not in (None, "default"):
        raise UsageError(
            f"--logs-specs {args.logs_specs!r}: third-party logs specs are not supported; "
            "use --redirects, --tee and --log-dir"
        )
    nproc = _count_ranks(args.nproc_per_node, environ, count_devices)
    conf = parse_conf(args.rdzv_conf)
    backend, endpoint, run_id, is_single, master = _rendezvous(args, conf, high, warnings)
    if "OMP_NUM_THREADS" not in environ and nproc > 1:
        warnings.append(
            "OMP_NUM_THREADS is not set: it is 1 for each rank, so that they do not overload the machine; "
            "set it to what your job does best with"
        )
    handled = parse_signals(args.signals_to_handle, "--signals-to-handle", warnings)
    return LaunchSpec(
        entry=_entry(args),
        python=environ.get("PYTHON_EXEC", sys.executable),
        nproc=nproc,
        min_nodes=low,
        max_nodes=high,
        is_single=is_single,
        backend=backend,
        endpoint=endpoint,
        run_id=run_id,
        conf=conf,
        node_rank=None if isinstance(args.node_rank, NotGiven) else args.node_rank,
        master=master,
        local_addr=args.local_addr or "",
        role=args.role,
        max_restarts=args.max_restarts,
        redirects=logs.parse_masks(args.redirects, "--redirects"),
        tee=logs.parse_masks(args.tee, "--tee"),
        local_ranks_filter=logs.parse_local_ranks(args.local_ranks_filter),
        stdout_filters=tuple(args.duplicate_stdout_filters),
        stderr_filters=tuple(args.duplicate_stderr_filters),
        log_dir=args.log_dir,
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        event_log_handler=args.event_log_handler,
        numa_binding=args.numa_binding,
        virtual_local_rank=args.virtual_local_rank,
        signals_to_handle=handled,
        signals_text=args.signals_to_handle,
        forward_signals=tuple(
            number
            for number in parse_signals(args.forward_signals, "--forward-signals", warnings)
            if number not in handled
        ),
        signal_scope=args.signal_scope,
        shutdown_timeout_s=_grace_s(args.shutdown_timeout, environ),
        rank_hooks=args.rank_hooks == "auto",
        allow_mixed=args.allow_mixed_environments,
        restart_refill_s=_not_negative(args.restart_refill, "--restart-refill"),
        restart_backoff_s=_not_negative(args.restart_backoff, "--restart-backoff") or 0.0,
        events_dir=args.events_dir,
        quiet=args.quiet,
        join_timeout_s=_conf_number(conf, "join_timeout", 600.0),
        last_call_s=_conf_number(conf, "last_call_timeout", 30.0),
        keep_alive_interval_s=_conf_number(conf, "keep_alive_interval", 5.0),
        keep_alive_max_attempt=int(_conf_number(conf, "keep_alive_max_attempt", 3.0)),
        is_host=_conf_bool(conf, "is_host"),
        port_range=_port_range(conf.get("port_range")),
        max_membership_changes=int(_conf_number(conf, "max_membership_changes", 20.0)),
        warnings=tuple(warnings),
    )


# ---- rendezvous ----------------------------------------------------------------------------------------------


def parse_conf(text: str) -> dict[str, str]:
    """`k=v,k=v`; what no key of ours asks for is never looked at."""
    conf: dict[str, str] = {}
    for part in text.strip().split(",") if text.strip() else ():
        key, equals, value = part.strip().partition("=")
        if not key or not equals or not value:
            raise ConfigError(f"--rdzv-conf {text!r}: {part.strip()!r} is not KEY=VALUE")
        conf[key] = value
    return conf


def _rendezvous(
    args: argparse.Namespace, conf: Mapping[str, str], max_nodes: int, warnings: list[str]
) -> tuple[str, tuple[str, int], str, bool, tuple[str, int] | None]:
    """Backend, endpoint, run id, whether no networking is needed, and the given master."""
    backend = args.rdzv_backend
    if args.standalone:
        if max_nodes > 1:
            warnings.append("--standalone is for one node: --nnodes is not heeded")
        given = [
            f"--rdzv-{name}"
            for name, value, default in (
                ("backend", backend, "static"),
                ("endpoint", args.rdzv_endpoint, ""),
                ("id", args.rdzv_id, "none"),
            )
            if value != default
        ]
        if given:
            warnings.append(f"--standalone overrides {', '.join(given)}")
        return "c10d", ("localhost", 0), _fresh_id(), True, None
    if backend in ("etcd", "etcd-v2"):
        raise UsageError(
            f"--rdzv-backend {backend}: no store of its own is needed; use c10d with the same endpoint"
        )
    if backend not in ("static", "c10d"):
        raise UsageError(f"--rdzv-backend {backend!r} is not supported: use c10d (or static)")
    if conf.get("store_type", "tcp") != "tcp":
        raise UsageError(
            "--rdzv-conf store_type: nodes meet over TCP; leave it out and give --rdzv-endpoint HOST:PORT"
        )
    if backend == "c10d":
        if not args.rdzv_endpoint:
            if max_nodes > 1:
                raise ConfigError("--rdzv-backend c10d needs --rdzv-endpoint HOST[:PORT] for several nodes")
            return backend, ("localhost", 0), args.rdzv_id, True, None
        return backend, parse_endpoint(args.rdzv_endpoint, C10D_PORT), args.rdzv_id, False, None
    if not args.rdzv_endpoint and args.master_port is None and max_nodes == 1:
        return "c10d", ("localhost", 0), _fresh_id(), True, None  # as if --standalone had been given
    port = STATIC_PORT if args.master_port is None else args.master_port
    text = args.rdzv_endpoint or f"{args.master_addr}:{port}"
    endpoint = parse_endpoint(text, STATIC_PORT)
    node_rank = int(args.node_rank)
    if not 0 <= node_rank < max_nodes:
        raise ConfigError(f"--node-rank {node_rank} does not fit --nnodes {args.nnodes}: ranks go from 0")
    return backend, endpoint, args.rdzv_id, max_nodes == 1, endpoint


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or text.strip().endswith("]"):
        host, port = text.strip(), str(default_port)  # a bare name or IPv6 address
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"endpoint {text!r}: give HOST or HOST:PORT with a port up to 65535")
    return host, int(port)


def _fresh_id() -> str:
    """A random uuid4."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _conf_number(conf: Mapping[str, str], key: str, default: float) -> float:
    text = conf.get(key)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"--rdzv-conf {key}={text}: give a number") from None
    if not 0 <= number < 1e9:
        raise ConfigError(f"--rdzv-conf {key}={text}: must not be negative")
    return number


def _conf_bool(conf: Mapping[str, str], key: str) -> bool | None:
    text = conf.get(key)
    if text is None:
        return None
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"--rdzv-conf {key}={text}: give 1 or 0")


def _port_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) <= 65535):
        raise ConfigError(f"--rdzv-conf port_range={text}: give LOW-HIGH, as in 30000-30100")
    return int(low), int(high)


# ---- ranks ---------------------------------------------------------------------------------------------------


def _count_ranks(
    text: str, environ: Mapping[str, str], count_devices: Callable[[str, Mapping[str, str]], int] | None
) -> int:
    try:
        count = int(text)
    except ValueError:
        if text not in ("cpu", "gpu", "xpu", "auto"):
            raise ConfigError(f"--nproc-per-node {text!r}: give a number, cpu, gpu, xpu or auto") from None
        if count_devices is None:
            from launcher.devices import count_devices
        count = count_devices(text, environ)
    if count < 1:
        raise ConfigError(f"--nproc-per-node {text}: at least one rank is needed")
    return count


def _entry(args: argparse.Namespace) -> Entry:
    target, rest = args.training_script, tuple(args.training_script_args)
    if args.run_path:
        if not os.path.isabs(target):
            raise ConfigError(f"--run-path needs an absolute path, not {target!r}")
        return Entry("run-path", target, rest)
    if args.no_python:
        if args.module:
            raise ConfigError("--no-python and --module cannot be used together: give one of them")
        return Entry("program", target, rest)
    return Entry("module" if args.module else "script", target, rest)


def parse_signals(text: str, flag: str, warnings: list[str]) -> tuple[int, ...]:
    """Comma-separated names; unknown ones are warned of and left out, as in torchrun."""
    found: list[int] = []
    for name in (part.strip() for part in text.split(",")):
        if not name:
            continue
        number = getattr(signal, name, None) if name.startswith("SIG") and name not in _PROTECTED else None
        if not isinstance(number, signal.Signals):
            warnings.append(f"{flag}: {name} is no signal that can be handled; left out")
        elif int(number) not in found:
            found.append(int(number))
    return tuple(found)


def _grace_s(given: int | None, environ: Mapping[str, str]) -> float:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if given is None and text is not None:
        try:
            given = int(text)
        except ValueError:
            raise ConfigError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: give whole seconds") from None
    if given is not None and given < 0:
        raise ConfigError(f"--shutdown-timeout {given}: must not be negative")
    return GRACE_S if given is None else float(given)


def _not_negative(value: float | None, flag: str) -> float | None:
    if value is not None and not 0 <= value < 1e9:
        raise UsageError(f"{flag} {value:g}: must not be negative")
    return value
