"""The user's options, parsed once and frozen: command line and variables in, LaunchSpec out.

Every mistake is found here, before anything runs, and reported in one line. The exit status is 2 for errors of
argparse and of Bootseer's flags, and 1 where torchrun raises an exception.
"""

from __future__ import annotations

import os
import sys

from bootseer.errors import ConfigError, UsageError
from bootseer.light_stdlib import signal
from bootseer.light_typing import TYPE_CHECKING, Callable, Mapping, NamedTuple
from launcher.cli import rendezvous_options
from launcher.ranks.output import logs

if TYPE_CHECKING:
    from bootseer.health.options import Options as CheckOptions
    from bootseer.tuning import LauncherTuning
    from launcher.cli.image_options import ImageOptions
    from launcher.cli.quick_parse import Arguments
    from launcher.cli.setup_options import CachesOptions, SetupOptions
    from launcher.cli.step_options import StepOptions
    from launcher.coordinator.job import JobRules
    from launcher.rules.rule import Rule

GRACE_S = 30.0
PRELOAD_TIMEOUT_S = 120.0
TUNING_VARIABLE = "BOOTSEER_TUNING"  # of bootseer.tuning, which is imported only if something is set
_PROTECTED = ("SIGKILL", "SIGSTOP", "SIGCHLD")


class Entry(NamedTuple):
    """The program that each rank runs."""

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
    master: tuple[str, int] | None  # given by the user; None: the coordinator chooses
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
    fork_ranks: str  # auto | restarts | on | off
    preload: tuple[str, ...]  # as given
    preload_timeout_s: float
    record_start: bool  # record its access trace, and prefetch it at the next start
    image: ImageOptions | None  # None: ranks see this node's file system
    setup: SetupOptions | None  # None: the environment is used as it is
    caches: CachesOptions | None  # None: compile caches are not kept
    load_checkpoint: str  # URL, "" for none
    checkpoint_memory_bytes: int | None  # None: a quarter of the node's memory
    checkpoint_disk_bytes: int
    checkpoint_fallback: str  # none | older: the version to load if the newest cannot be loaded
    checkpoint_files: bool  # ranks may open it by name, so BOOTSEER_CHECKPOINT has to be a path
    require_checkpoint: bool
    keep_arena: bool
    arena_bytes: int
    peers: bool  # nodes share data if the job has a secret
    peers_upload_bytes_per_s: int | None  # to other nodes; None: no limit
    allow_mixed: bool
    restart_refill_s: float | None
    restart_backoff_s: float
    on_hang: str  # report | restart | off
    check: str  # off | report | fail
    check_options: CheckOptions | None  # None: not given
    check_pairs: str  # auto | always | off
    hang_least_s: float
    log_rules: tuple[Rule, ...]  # of the user, over the ranks' output
    known_rules: bool  # also apply the built-in rules
    trace_collectives: bool
    stops_on_same_error: bool
    excludes_nodes: bool
    stops_without_progress: bool
    give_up_status: int
    steps: StepOptions | None  # of the escalation ladder; None: none requested
    events_dir: str | None
    dashboard: tuple[str, ...]  # arguments of `bootseer serve`; (): none is started
    quiet: bool
    strict: bool  # end the job on a failure before ranks run, also if there is a fallback
    join_timeout_s: float
    last_call_s: float
    keep_alive_interval_s: float
    keep_alive_max_attempt: int
    is_host: bool | None
    port_range: tuple[int, int] | None
    max_membership_changes: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]  # information for the user, such as which file was read
    tuning: Mapping[str, str] = {}  # noqa: RUF012  of changed limits

    @property
    def can_restart(self) -> bool:
        """Whether there can be more than one attempt, after failures or membership changes."""
        return self.max_restarts > 0 or self.min_nodes < self.max_nodes

    @property
    def has_rules(self) -> bool:
        """Whether rules are applied to the ranks' output."""
        return self.known_rules or bool(self.log_rules)

    def _check_pairs_when(self) -> str:
        if self.is_single or self.check_pairs != "auto":
            return "off" if self.is_single else self.check_pairs
        return "network" if self.check == "off" else "always"

    def job_rules(self) -> JobRules:
        """Return the options that the job's state machine needs."""
        from launcher.coordinator.job import JobRules
        from launcher.coordinator.restart_policy import StepLimits

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
            on_hang=self.on_hang,
            hang_least_s=self.hang_least_s,
            log_rules=self.log_rules,
            stops_on_same_error=self.stops_on_same_error,
            excludes_nodes=self.excludes_nodes,
            stops_without_progress=self.stops_without_progress,
            give_up_status=self.give_up_status,
            check_pairs=self._check_pairs_when(),
            check_limits=() if self.check_options is None else self.check_options.limits,
            allow_mixed=self.allow_mixed,
            mixed_arguments=bool(rendezvous_options.read_flag(self.conf, "mixed_arguments")),
            frees_endpoint=static and not self.is_single,
            setup_s=0.0 if self.setup is None else self.setup.max_s,
            setup_wait_s=0.0 if self.setup is None else self.setup.wait_s,
            steps=StepLimits() if self.steps is None else self.steps.limits,
            tuning=self._launcher_tuning(),
        )

    def _launcher_tuning(self) -> LauncherTuning | None:
        if not self.tuning:
            return None
        from bootseer import tuning

        return tuning.parse(self.tuning[TUNING_VARIABLE]).launcher


def build_spec(
    args: Arguments,
    environ: Mapping[str, str],
    count_devices: Callable[[str, Mapping[str, str]], int] | None = None,
) -> LaunchSpec:
    """Check a parsed command line and build its LaunchSpec; `count_devices` resolves cpu, gpu, xpu and auto."""
    warnings: list[str] = []
    note = _config(args, environ)
    _check(args)
    nproc = _count_ranks(args.nproc_per_node, environ, count_devices)
    conf = rendezvous_options.parse_conf(args.rdzv_conf)
    meeting = rendezvous_options.find_meeting(args, conf, warnings)
    timing = rendezvous_options.read_timing(conf, meeting.backend)
    _check_devices(args, nproc, environ)
    if "OMP_NUM_THREADS" not in environ and nproc > 1:
        warnings.append(
            "OMP_NUM_THREADS is not set: each rank gets 1, so that ranks do not overload the machine; "
            "set it to the best value for your job"
        )
    if args.trace_collectives and (args.rank_hooks == "off" or args.on_hang == "off"):
        off = "--rank-hooks" if args.rank_hooks == "off" else "--on-hang"
        warnings.append(f"--trace-collectives does nothing with {off} off: leave one of them out")
    image = _image(args, environ, warnings)
    handled = parse_signals(args.signals_to_handle, "--signals-to-handle", warnings)
    return LaunchSpec(
        entry=_entry(args, image is not None),
        python=environ.get("PYTHON_EXEC") or sys.executable,
        nproc=nproc,
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        is_single=meeting.is_single,
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        run_id=meeting.run_id or _fresh_id(),
        conf=conf,
        node_rank=meeting.node_rank,
        master=meeting.master,
        local_addr=args.local_addr or "",
        role=args.role,
        max_restarts=args.max_restarts,
        redirects=logs.parse_masks(args.redirects, "--redirects"),
        tee=logs.parse_masks(args.tee, "--tee"),
        local_ranks_filter=logs.parse_local_ranks(args.local_ranks_filter),
        stdout_filters=tuple(args.duplicate_stdout_filters),
        stderr_filters=tuple(args.duplicate_stderr_filters),
        log_dir=args.log_dir,
        log_line_prefix_template=args.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        event_log_handler=args.event_log_handler,
        numa_binding=args.numa_binding,
        virtual_local_rank=args.virtual_local_rank,
        signals_to_handle=handled,
        signals_text=args.signals_to_handle,
        forward_signals=_forwarded(args.forward_signals, handled),
        signal_scope=args.signal_scope,
        shutdown_timeout_s=_grace_s(args.shutdown_timeout, environ),
        rank_hooks=args.rank_hooks == "auto",
        fork_ranks=args.fork_ranks or "auto",
        preload=_preload(args.preload),
        preload_timeout_s=_preload_timeout_s(args.preload_timeout),
        record_start=args.record_start != "off",
        image=image,
        setup=_setup(args),
        caches=_caches(args),
        load_checkpoint=_checkpoint(args.load_checkpoint),
        checkpoint_memory_bytes=parse_size(args.checkpoint_memory, "--checkpoint-memory"),
        checkpoint_disk_bytes=parse_size(args.checkpoint_disk, "--checkpoint-disk") or 0,
        checkpoint_fallback=args.checkpoint_fallback or "none",
        checkpoint_files=args.checkpoint_files != "off",
        require_checkpoint=args.require_checkpoint,
        keep_arena=args.keep_arena,
        arena_bytes=parse_size(args.arena_bytes, "--arena-bytes") or 0,
        peers=args.peers != "off",
        peers_upload_bytes_per_s=parse_size(args.peers_upload, "--peers-upload"),
        allow_mixed=args.allow_mixed_environments,
        restart_refill_s=_not_negative(args.restart_refill, "--restart-refill"),
        restart_backoff_s=_not_negative(args.restart_backoff, "--restart-backoff") or 0.0,
        on_hang=args.on_hang or "report",
        check=args.check or "off",
        check_options=_check_options(args),
        check_pairs=args.check_pairs or "auto",
        hang_least_s=_hang_least_s(args.hang_least),
        log_rules=_log_rules(args),
        known_rules=args.log_rules in (None, "all"),
        trace_collectives=args.trace_collectives,
        stops_on_same_error=args.same_error != "restart",
        excludes_nodes=args.exclude_nodes != "off",
        stops_without_progress=args.no_progress != "restart",
        give_up_status=_give_up_status(args.give_up_status),
        steps=_steps(args, warnings),
        events_dir=args.events_dir,
        dashboard=_dashboard(args),
        quiet=args.quiet,
        strict=args.strict,
        join_timeout_s=timing.join_timeout_s,
        last_call_s=timing.last_call_s,
        keep_alive_interval_s=timing.keep_alive_interval_s,
        keep_alive_max_attempt=timing.keep_alive_max_attempt,
        is_host=rendezvous_options.read_is_host(conf),
        port_range=rendezvous_options.read_port_range(conf),
        max_membership_changes=timing.max_membership_changes,
        warnings=tuple(warnings),
        notes=(note,) if note else (),
        tuning=_tuning(args, environ),
    )


def _dashboard(args: Arguments) -> tuple[str, ...]:
    if not args.dashboard:
        if args.dashboard_token_file:
            raise UsageError("--dashboard-token-file needs --dashboard")
        return ()
    from launcher.base.listen_address import parse_address

    address = parse_address("" if args.dashboard == "on" else args.dashboard)
    if args.dashboard_token_file:
        return str(address), "--token-file", args.dashboard_token_file
    if not address.is_loopback:
        raise UsageError(
            f"--dashboard {address}: other machines can reach it, so give --dashboard-token-file FILE"
        )
    return (str(address),)


def _config(args: Arguments, environ: Mapping[str, str]) -> str:
    directories = (os.path.dirname(args.training_script or ""), "")
    if args.config is None and not any(
        os.path.exists(f"{directory or '.'}/bootseer.toml") for directory in directories
    ):
        return ""
    from launcher.cli.config_file import apply_config

    return apply_config(args, environ)


def _tuning(args: Arguments, environ: Mapping[str, str]) -> Mapping[str, str]:
    file, inherited = getattr(args, "tuning", None), environ.get(TUNING_VARIABLE, "")
    if not file and not inherited:
        return {}
    from bootseer.tuning_limits import merge

    return merge(file or {}, inherited)


def _setup(args: Arguments) -> SetupOptions | None:
    given = (args.setup, args.setup_input, args.setup_target, args.setup_variable, args.setup_timeout)
    more = (args.setup_wait, args.env_store, args.env_key, args.env_max_age, args.env_way)
    if not any((*given, *more)):
        return None
    from launcher.cli.setup_options import read_setup

    return read_setup(args, os.path.abspath)


def _caches(args: Arguments) -> CachesOptions | None:
    if not (args.keep_caches or args.cache_dir or args.env_store):
        return None
    from launcher.cli.setup_options import read_caches

    return read_caches(args, os.path.abspath)


def _steps(args: Arguments, warnings: list[str]) -> StepOptions | None:
    commands = (args.post_mortem, args.stop_checks, args.rollback_command, args.replay_command)
    limits = (args.post_mortem_timeout, args.stop_checks_timeout, args.rollback_timeout, args.replay_timeout)
    if all(given is None for given in (*commands, *limits)):
        return None
    from launcher.cli.step_options import read_steps

    return read_steps(args, warnings)


def _check(args: Arguments) -> None:
    """Raise for single values that are invalid."""
    if args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: must not be negative")
    if not args.monitor_interval > 0:
        raise ConfigError(f"--monitor-interval {args.monitor_interval:g}: must be more than 0")
    if args.event_log_handler not in ("null", "console"):
        raise ConfigError(f"--event-log-handler {args.event_log_handler!r}: there are null and console")
    if args.logs_specs not in (None, "default"):
        raise UsageError(
            f"--logs-specs {args.logs_specs!r}: third-party logs specs are not supported; "
            "use --redirects, --tee and --log-dir"
        )


def _hang_least_s(given: float | None) -> float:
    if given is not None and not 1 <= given <= 86400:
        raise UsageError(f"--hang-least {given:g}: give 1 to 86400 seconds")
    return 15.0 if given is None else given


def _log_rules(args: Arguments) -> tuple[Rule, ...]:
    """Return the rules of bootseer.toml; invalid rules raise even if rules are off."""
    tables = getattr(args, "rules", None)
    if not tables:
        return ()
    from launcher.rules.rule import read_rules

    rules = read_rules(tables, args.rules_file)
    return () if args.log_rules == "off" else rules


def _check_options(args: Arguments) -> CheckOptions | None:
    """Return the options of --check; invalid ones raise even if checks are off."""
    numbers = (args.check_expect_gpus, args.check_timeout, args.check_every)
    lists = (args.check_path, args.check_nic, args.check_own, args.check_limit)
    if not any(lists) and numbers == (None, None, None):
        return None
    from bootseer.health.options import read_options

    gpus, timeout_s, every_s = numbers
    paths, nics, own, limits = lists
    return read_options("--check-", paths, nics, gpus, own, timeout_s, every_s, limits)


def _give_up_status(given: int | None) -> int:
    if given is not None and not 0 < given < 126:
        raise UsageError(f"--give-up-status {given}: give 1 to 125; shells use the values above")
    return 1 if given is None else given


def _fresh_id() -> str:
    """Return a random uuid4."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


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
            from launcher.ranks import devices  # most jobs name a number

            count_devices = devices.count_devices
        count = count_devices(text, environ)
    if count < 1:
        raise ConfigError(f"--nproc-per-node {text}: at least one rank is needed")
    return count


def _check_devices(args: Arguments, nproc: int, environ: Mapping[str, str]) -> None:
    """Check that there are devices for all ranks, before any rank runs."""
    if args.virtual_local_rank:
        from launcher.ranks.devices import visible_device_of

        visible_device_of(environ, nproc - 1)
    if args.numa_binding is not None:
        from launcher.ranks.numa import numactl_prefix

        numactl_prefix(args.numa_binding, nproc - 1, environ)


def _entry(args: Arguments, is_inside: bool) -> Entry:
    target, rest = args.training_script, tuple(args.training_script_args)
    if args.run_path:
        if not os.path.isabs(target):
            raise ConfigError(f"--run-path needs an absolute path, not {target!r}")
        return Entry("run-path", target, rest)
    if args.no_python:
        if args.module:
            raise ConfigError("--no-python and --module cannot be used together: give one of them")
        return Entry("program", target, rest)
    if args.module:
        return Entry("module", target, rest)
    may_be_inside = is_inside and os.path.isabs(target)
    if target != "-" and "$" not in target and not may_be_inside and not os.path.exists(target):
        raise ConfigError(
            f"script {target!r} does not exist: give a path relative to this directory, or -m for a module"
        )
    return Entry("script", target, rest)


def parse_signals(text: str, flag: str, warnings: list[str]) -> tuple[int, ...]:
    """Parse comma-separated names; warn of unknown ones and skip them, as torchrun does."""
    found: list[int] = []
    for name in (part.strip() for part in text.split(",")):
        if not name:
            continue
        is_signal = name.startswith("SIG") and not name.startswith("SIG_") and name not in _PROTECTED
        number = getattr(signal, name, None) if is_signal else None
        if number is None:
            warnings.append(f"{flag}: {name} is no signal that can be handled; left out")
        elif int(number) not in found:
            found.append(int(number))
    return tuple(found)


def _forwarded(text: str, handled: tuple[int, ...]) -> tuple[int, ...]:
    """Return the signals that only go to ranks: those that do not end the job."""
    wrong: list[str] = []
    numbers = parse_signals(text, "--forward-signals", wrong)
    if wrong:
        raise UsageError(wrong[0].removesuffix("; left out"))
    return tuple(number for number in numbers if number not in handled)


def _grace_s(given: int | None, environ: Mapping[str, str]) -> float:
    if given is not None:
        if given < 0:
            raise ConfigError(f"--shutdown-timeout {given}: must not be negative")
        return float(given)
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None:
        return GRACE_S
    if not text.strip().isdecimal():
        raise ConfigError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: give whole seconds, 0 or more")
    return float(text)


def _image(args: Arguments, environ: Mapping[str, str], warnings: list[str]) -> ImageOptions | None:
    given = (args.image_name, args.image_bind, args.image_python, args.image_env)
    if args.image is None and args.image_writable is None and not any(given):
        return None
    from launcher.cli.image_options import read_options

    if environ.get("PYTHON_EXEC"):
        warnings.append("PYTHON_EXEC is not used with --image: --image-python names an interpreter inside")
    return read_options(
        args.image,
        args.image_name,
        "tmpfs" if args.image_writable is None else args.image_writable,
        args.image_bind,
        args.image_python,
        args.image_env,
        os.path.abspath,
        tuple(map(os.path.abspath, args.setup_target or ())),
    )


def _checkpoint(url: str | None) -> str:
    if url is None:
        return ""
    from launcher.cli.typed_place import parse_location

    return parse_location(url, "--load-checkpoint", "hdfs://namenode/run1/checkpoints", os.path.abspath)


def parse_size(text: str | None, flag: str) -> int | None:
    """Parse a number of bytes such as 4096, 512MiB, 1.5GiB, 200GB."""
    if text is None:
        return None
    from bootseer.cli import sizes

    return sizes.parse_size(text, flag)


def _preload(names: list[str]) -> tuple[str, ...]:
    """Check module names; the fork server finds out whether they can be imported."""
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"--preload {name!r}: give names of modules, as in --preload numpy,torch.optim")
    return tuple(names)


def _preload_timeout_s(given: float | None) -> float:
    found = _not_negative(given, "--preload-timeout")
    return PRELOAD_TIMEOUT_S if found is None else found


def _not_negative(value: float | None, flag: str) -> float | None:
    if value is not None and not 0 <= value < 1e9:
        raise UsageError(f"{flag} {value:g}: give seconds, 0 or more")
    return value
