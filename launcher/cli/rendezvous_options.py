"""The user's rendezvous options: backend, endpoint, --rdzv-conf and --standalone, checked. Pure.

In: the parsed command line. Out: `RendezvousPlace` (the place and name of the rendezvous) and `Timing`. Unknown
keys of --rdzv-conf are ignored: users of torchrun pass many.
"""

from __future__ import annotations

from bootseer.errors import ConfigError, UsageError
from bootseer.light_typing import TYPE_CHECKING, Mapping, NamedTuple
from launcher.cli.flags import NotGiven

if TYPE_CHECKING:
    from launcher.cli.quick_parse import Arguments

C10D_PORT = 29400
STATIC_PORT = 29500
LOCAL_ENDPOINT = ("localhost", 0)
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_HOST_SIGNS = "_.:%-"  # beside letters and digits


class RendezvousPlace(NamedTuple):
    backend: str  # static | c10d
    min_nodes: int
    max_nodes: int
    endpoint: tuple[str, int]
    run_id: str  # "": a fresh one is made
    is_single: bool  # one node, and no other can join: no networking
    master: tuple[str, int] | None  # given by the user; None: bootrun chooses
    node_rank: int | None  # None: not given, or meaningless


class Timing(NamedTuple):
    """Numbers of --rdzv-conf."""

    join_timeout_s: float
    last_call_s: float
    keep_alive_interval_s: float
    keep_alive_max_attempt: int
    max_membership_changes: int


def parse_min_max_nnodes(text: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX`."""
    parts = text.split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(f"--nnodes {text!r}: give a number of nodes or MIN:MAX, as in 2 or 1:4")
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        raise ConfigError(f"--nnodes {text!r}: MIN must be at least 1 and at most MAX")
    return low, high


def parse_conf(text: str) -> dict[str, str]:
    """Parse `k=v,k=v`; unknown keys are never used."""
    conf: dict[str, str] = {}
    for part in text.strip().split(",") if text.strip() else ():
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf {text!r}: {part.strip()!r} is not KEY=VALUE")
        conf[key] = value
    return conf


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Parse `host`, `host:port`, `[v6]:port` or a bare IPv6 address."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or text.endswith("]"):
        host, port = text, str(default_port)  # a bare name or IPv6 address
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_host = host and all(each.isalnum() or each in _HOST_SIGNS for each in host)
    if not is_host or not _is_number(port, 5) or int(port) > 65535:
        raise ConfigError(f"endpoint {text!r}: give HOST or HOST:PORT with a port up to 65535")
    return host, int(port)


def find_meeting(args: Arguments, conf: Mapping[str, str], warnings: list[str]) -> RendezvousPlace:
    """Return where the nodes of this job meet; report ignored options in `warnings`."""
    low, high = parse_min_max_nnodes(args.nnodes)
    if args.standalone:
        return _standalone(args, high, warnings)
    _check_backend(args.rdzv_backend, conf)
    if args.rdzv_backend == "static":
        return _static(args, low, high, warnings)
    return _c10d(args, low, high, warnings)


def read_timing(conf: Mapping[str, str], backend: str) -> Timing:
    """Read the numbers of --rdzv-conf; `timeout` is how long a static job gathers, as in torchrun."""
    if backend == "c10d":
        _number(conf, "cas_backoff_max_seconds", 0.0)  # only torch's store uses it; a wrong value is an error
    waits = "timeout" if backend == "static" and "join_timeout" not in conf else "join_timeout"
    return Timing(
        join_timeout_s=_number(conf, waits, 900.0 if waits == "timeout" else 600.0, positive=True),
        last_call_s=_number(conf, "last_call_timeout", 30.0),
        keep_alive_interval_s=_number(conf, "keep_alive_interval", 5.0, positive=True),
        keep_alive_max_attempt=_whole(conf, "keep_alive_max_attempt", 3, least=1),
        max_membership_changes=_whole(conf, "max_membership_changes", 20, least=0),
    )


def read_is_host(conf: Mapping[str, str]) -> bool | None:
    """Read is_host as torch reads booleans; None if not given."""
    return read_flag(conf, "is_host")


def read_flag(conf: Mapping[str, str], key: str) -> bool | None:
    """Read a boolean key as torch reads booleans; None if not given."""
    text = conf.get(key)
    if text is None:
        return None
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ConfigError(f"--rdzv-conf {key}={text}: give 1 or 0")


def read_port_range(conf: Mapping[str, str]) -> tuple[int, int] | None:
    """Read the range of ports that the launcher may choose for rank 0."""
    text = conf.get("port_range")
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) <= 65535):
        raise ConfigError(f"--rdzv-conf port_range={text}: give LOW-HIGH, as in 30000-30100")
    return int(low), int(high)


# ---- backends ------------------------------------------------------------------------------------------------


def _check_backend(backend: str, conf: Mapping[str, str]) -> None:
    if backend in ("etcd", "etcd-v2"):
        raise UsageError(f"--rdzv-backend {backend} is not supported and not needed: use c10d, without a server")
    if backend not in ("static", "c10d"):
        raise UsageError(f"--rdzv-backend {backend!r} is not supported: use c10d (or static)")
    if backend == "c10d" and conf.get("store_type", "tcp") != "tcp":
        raise UsageError("--rdzv-conf store_type: nodes meet over TCP; omit it and give --rdzv-endpoint HOST:PORT")


def _standalone(args: Arguments, high: int, warnings: list[str]) -> RendezvousPlace:
    vain = _given(args, "rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port")
    if vain:
        warnings.append(f"--standalone overrides {', '.join(vain)}")
    if high > 1:
        warnings.append("--standalone is for one node: --nnodes is ignored")
    return RendezvousPlace("c10d", 1, 1, LOCAL_ENDPOINT, "", True, None, None)


def _static(args: Arguments, low: int, high: int, warnings: list[str]) -> RendezvousPlace:
    if not args.rdzv_endpoint and args.master_port is None and high == 1:
        if _given(args, "rdzv_id"):
            warnings.append("--rdzv-id is ignored for a job on one node without --rdzv-endpoint")
        return RendezvousPlace(
            "c10d", 1, 1, LOCAL_ENDPOINT, "", True, None, None
        )  # as if --standalone had been given
    if low != high:
        warnings.append(f"--nnodes {args.nnodes}: static waits for all {high} nodes; c10d takes MIN:MAX")
    node_rank = int(args.node_rank)
    if not 0 <= node_rank < high:
        raise ConfigError(f"--node-rank {node_rank} does not fit --nnodes {args.nnodes}: ranks go from 0")
    port = STATIC_PORT if args.master_port is None else args.master_port
    host = args.master_addr
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"
    endpoint = parse_endpoint(args.rdzv_endpoint or f"{host}:{port}", STATIC_PORT)
    return RendezvousPlace("static", high, high, endpoint, args.rdzv_id, high == 1, endpoint, node_rank)


def _c10d(args: Arguments, low: int, high: int, warnings: list[str]) -> RendezvousPlace:
    vain = _given(args, "master_addr", "master_port")
    if vain:
        warnings.append(f"{', '.join(vain)}: only for static; c10d uses --rdzv-endpoint")
    endpoint = parse_endpoint(args.rdzv_endpoint or "localhost", C10D_PORT)
    is_single = high == 1 and not args.rdzv_endpoint
    if endpoint[1] == 0:
        if low > 1:
            raise ConfigError(
                f"--rdzv-endpoint {args.rdzv_endpoint}: other nodes cannot know which port it is; give one"
            )
        if high > 1:
            warnings.append("--rdzv-endpoint with port 0 is unknown to other nodes: this node runs alone")
        high, is_single = 1, True
    if high > 1 and not args.rdzv_endpoint:
        warnings.append("--rdzv-endpoint is not given: only nodes on this host can meet, at localhost")
    node_rank: int | None = None if isinstance(args.node_rank, NotGiven) else args.node_rank
    if node_rank is not None and not 0 <= node_rank < high:
        warnings.append(f"--node-rank {node_rank} does not fit --nnodes {args.nnodes} and is ignored")
        node_rank = None
    return RendezvousPlace(
        "c10d", low, high, endpoint, args.rdzv_id, is_single, None, None if is_single else node_rank
    )


_DEFAULTS = {
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "master_addr": "127.0.0.1",
    "master_port": None,
}


def _given(args: Arguments, *names: str) -> list[str]:
    """Return the flags that the user has set."""
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) != _DEFAULTS[name]]


# ---- numbers -------------------------------------------------------------------------------------------------


def _number(conf: Mapping[str, str], key: str, default: float, positive: bool = False) -> float:
    text = conf.get(key)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"--rdzv-conf {key}={text}: give a number") from None
    if not 0 <= number < 1e9 or (positive and not number):
        raise ConfigError(f"--rdzv-conf {key}={text}: must {'be more than 0' if positive else 'not be negative'}")
    return number


def _whole(conf: Mapping[str, str], key: str, default: int, least: int) -> int:
    text = conf.get(key)
    if text is None:
        return default
    if not _is_number(text, 9) or int(text) < least:
        raise ConfigError(f"--rdzv-conf {key}={text}: give a whole number, {least} or more")
    return int(text)


def _is_number(text: str, digits: int) -> bool:
    """Return whether it is a whole number of at most so many digits."""
    return text.isascii() and text.isdigit() and len(text) <= digits
