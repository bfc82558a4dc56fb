"""The options of `bootseer serve`."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from bootseer.errors import ConfigError, UsageError
from bootseer.formats import one_line
from bootseer.mounts.tree_daemon.places import locate
from bootseer.secret import read_secret_file
from bootseer.storage.paths import redact
from launcher.base.listen_address import DEFAULT_HOST, DEFAULT_PORT, Address, parse_address
from launcher.serve.access import Access

NAME = "bootseer serve"
SERVER = "bootseer"  # begins the header `Server` of its answers
SHARE_HEADER = "X-Bootseer-Serves"  # of /healthz: whose jobs, and whether a token is needed
OTLP_S = 60.0  # between two exports
MIN_OTLP_S = 1.0
MAX_OTLP_S = 86400.0
_OF_METRICS, _OF_ALL = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL = "OTEL_EXPORTER_OTLP"
_EVERY = "OTEL_METRIC_EXPORT_INTERVAL"  # milliseconds
_PATH = "/v1/metrics"
MAX_IDLE_S = 30 * 86400.0
DESCRIPTION = (
    "Serve a page, an API and metrics about the running jobs of this user on this node. All of it is read-only."
)
EPILOG = f"""\
examples:
  bootseer serve                                     http://{DEFAULT_HOST}:{DEFAULT_PORT}/, for this node alone
  bootseer serve :9400 --token-file token            for other machines: each request needs the token
  bootseer serve :9400 --token-file token --tls-cert cert.pem --tls-key key.pem
  curl -s {DEFAULT_HOST}:{DEFAULT_PORT}/metrics                   what Prometheus reads
  curl -s {DEFAULT_HOST}:{DEFAULT_PORT}/api/v1/jobs | jq .        the same as: bootseer status --json
  curl -sN {DEFAULT_HOST}:{DEFAULT_PORT}/api/v1/jobs/run7/events
exit status: 0 after a signal, or when idle; 1 if it cannot listen; 2 for a wrong command line or token file
"""


class OtlpOptions(NamedTuple):
    """Where metrics are sent by OTLP."""

    endpoint: str  # URL, may have secrets
    every_s: float
    is_asked: bool  # by the flag; variables of OpenTelemetry are often set for other programs


class Options(NamedTuple):
    """What a server does."""

    address: Address
    access: Access
    tls: tuple[str, str] | None  # certificate and key
    idle_s: float | None  # end after this time without a job
    all_ranks: bool
    is_quiet: bool
    shares: bool  # it is no error that another one listens there
    otlp: OtlpOptions | None = None
    otlp_warning: str = ""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "address",
        nargs="?",
        default="",
        metavar="ADDR",
        help=f"HOST:PORT, :PORT or PORT to listen at; port 0: any (default: {DEFAULT_HOST}:{DEFAULT_PORT})",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="File with the token that each request must carry; required unless ADDR is of loopback",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="Certificate chain, as PEM: serve HTTPS")
    parser.add_argument("--tls-key", metavar="FILE", help="Private key of --tls-cert, as PEM")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="Further name of this server that requests may use, such as that of a proxy; may be repeated",
    )
    parser.add_argument(
        "--rank-metrics",
        choices=("auto", "all"),
        default="auto",
        help="Metrics of each rank: of jobs of at most 64 ranks, or of all jobs (default: auto)",
    )
    parser.add_argument(
        "--until-idle",
        type=float,
        metavar="S",
        help="End when no job has run here for S seconds (default: serve until a signal)",
    )
    parser.add_argument(
        "--share", action="store_true", help="End with 0 if another `bootseer serve` listens at ADDR already"
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        default="",
        help="Send the metrics to this OpenTelemetry collector each minute, such as http://localhost:4318"
        " (default: OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    parser.add_argument("--quiet", action="store_true", help="Do not print where it listens")
    return parser


def find_otlp(option: str, environ: Mapping[str, str]) -> tuple[OtlpOptions | None, str]:
    """Return where metrics are sent, None for nowhere; and a warning about variables that cannot be used, or "".

    Those variables are often set for other programs, so they never are an error. Raises: UsageError for `option`.
    """
    if option:
        endpoint = _endpoint_of(option, is_base=None)
        if endpoint is None:
            shown = one_line(redact(option))
            raise UsageError(f"--otlp {shown}: give the URL of a collector, such as http://localhost:4318")
        return OtlpOptions(endpoint, _find_every_s(environ) or OTLP_S, True), ""
    name = _OF_METRICS if environ.get(_OF_METRICS) else _OF_ALL
    value = environ.get(name, "")
    is_off = (
        environ.get("OTEL_METRICS_EXPORTER", "") == "none"
        or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    )
    if not value or is_off:
        return None, ""
    protocol = (
        environ.get(f"{_PROTOCOL}_METRICS_PROTOCOL") or environ.get(f"{_PROTOCOL}_PROTOCOL") or "http/protobuf"
    )
    endpoint = _endpoint_of(value, is_base=name == _OF_ALL)
    every_s = _find_every_s(environ)
    if protocol != "http/protobuf":
        why = f"{_PROTOCOL}_PROTOCOL={one_line(protocol)}: only http/protobuf is supported"
    elif endpoint is None:
        why = f"{name}={one_line(redact(value))}: no URL of HTTP"
    elif every_s is None:
        why = f"{_EVERY}={one_line(environ[_EVERY])}: give milliseconds, from {MIN_OTLP_S * 1000:g} on"
    else:
        return OtlpOptions(endpoint, every_s, False), ""
    return None, f"metrics are not sent by OTLP: {why}"


def _endpoint_of(text: str, *, is_base: bool | None) -> str | None:
    """Return the URL of a collector's metrics; None for one that is not HTTP.

    Args: is_base: whether the path of metrics is added; None: if it has no path.
    """
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  (is a number)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    path = parts.path.rstrip("/")
    if is_base or (is_base is None and not path):
        parts = parts._replace(path=path + _PATH)
    return parts.geturl()


def _find_every_s(environ: Mapping[str, str]) -> float | None:
    """Return the time between two exports; None for a value that is none."""
    text = environ.get(_EVERY, "")
    try:
        every_s = float(text) / 1000 if text else OTLP_S
    except ValueError:
        return None
    return every_s if MIN_OTLP_S <= every_s <= MAX_OTLP_S else None


def share_value(environ: Mapping[str, str], access: Access) -> str:
    """Return whose jobs a server serves, from which runtime directory, and whether it needs a token."""
    runtime = hashlib.sha256(os.fsencode(locate(environ))).hexdigest()[:16]
    return f"uid={os.geteuid()} runtime={runtime} token={'yes' if access.needs_token else 'no'}"


def parse(argv: Sequence[str]) -> Options:
    """Return the options. Raises: UsageError."""
    args = make_parser().parse_args(argv)
    if bool(args.tls_cert) != bool(args.tls_key):
        raise UsageError("--tls-cert and --tls-key belong together: give both, or none")
    if args.until_idle is not None and not 1 <= args.until_idle <= MAX_IDLE_S:
        raise UsageError(f"--until-idle {args.until_idle:g}: give 1 to {MAX_IDLE_S:.0f} seconds")
    address = parse_address(args.address)
    try:
        token = read_secret_file(args.token_file, "--token-file") if args.token_file else None
    except ConfigError as error:
        raise UsageError(str(error)) from None
    names = [os.uname().nodename, *args.allow_host]
    return Options(
        address,
        Access(address, token, names),
        (args.tls_cert, args.tls_key) if args.tls_cert else None,
        args.until_idle,
        args.rank_metrics == "all",
        args.quiet,
        args.share,
        *find_otlp(args.otlp, os.environ),
    )
