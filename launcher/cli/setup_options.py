"""PURE: the flags of set-up and of compile caches: how the ranks' environment is made, and where it is kept.

Every mistake is found before anything runs. The caller's function makes paths absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import UsageError
from bootseer.mounts.sandbox.binds import why_not_by_default

if TYPE_CHECKING:
    from launcher.cli.quick_parse import Arguments

WAYS = ("there", "mount", "unpack")
TIMEOUT_S = 3600.0
WAIT_S = 600.0
# The image's own files in these directories would be hidden.
_OF_IMAGE = ("", "/usr", "/usr/local", "/var/lib")
_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


class SetupOptions(NamedTuple):
    """How the ranks' environment is made. Paths are absolute."""

    commands: tuple[str, ...]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]  # (): the environment of the ranks' interpreter
    variables: tuple[str, ...]
    timeout_s: float  # of all commands together
    wait_s: float  # for another builder
    store: str  # URL, "" for none
    salt: str
    max_age_s: float | None
    ways: tuple[str, ...]  # methods of WAYS, in the order in which they are tried

    @property
    def max_s(self) -> float:
        """The time limit until an environment is ready, if nothing hangs."""
        return self.timeout_s + self.wait_s


class CachesOptions(NamedTuple):
    """Options of compile caches that are kept."""

    store: str  # URL, "": only on this node
    dirs: tuple[tuple[str, str], ...]  # name and absolute path of further directories
    salt: str


def read_setup(args: Arguments, absolute: Callable[[str], str]) -> SetupOptions | None:
    """Read the flags of set-up. Returns: None without --setup. Raises: UsageError."""
    if not args.setup:
        for flag, value in (
            ("--setup-input", args.setup_input),
            ("--setup-target", args.setup_target),
            ("--setup-variable", args.setup_variable),
            ("--setup-timeout", args.setup_timeout),
            ("--setup-wait", args.setup_wait),
            ("--env-max-age", args.env_max_age),
            ("--env-way", args.env_way),
        ):
            if value:
                raise UsageError(f"{flag} is without effect: give the command as well, by --setup COMMAND")
        return None  # a variable or file may set --env-store and --env-key for other jobs
    targets = _paths(args.setup_target, "--setup-target", absolute)
    for target in targets if args.image is not None else ():
        parent = target.rpartition("/")[0]
        if parent in _OF_IMAGE or why_not_by_default(parent):
            raise UsageError(
                f"--setup-target {target}: with --image its parent directory is this node's, also in the image: "
                "give a directory below one of your own, or none for a virtual environment on top of the image's"
            )
    for command in args.setup:
        if not command.strip() or "\0" in command:
            raise UsageError("--setup: a command is empty or contains a NUL character")
    for name in args.setup_variable:
        if not name or "=" in name or "\0" in name:
            raise UsageError(f"--setup-variable {name[:80]!r}: give the name of a variable")
    return SetupOptions(
        commands=tuple(args.setup),
        inputs=_paths(args.setup_input, "--setup-input", absolute),
        targets=targets,
        variables=tuple(args.setup_variable),
        timeout_s=_seconds(args.setup_timeout, "--setup-timeout", TIMEOUT_S),
        wait_s=_seconds(args.setup_wait, "--setup-wait", WAIT_S),
        store=_store(args.env_store, absolute),
        salt=args.env_key or "",
        max_age_s=None if args.env_max_age is None else _age(args.env_max_age),
        ways=_ways(args.env_way),
    )


def read_caches(args: Arguments, absolute: Callable[[str], str]) -> CachesOptions | None:
    """Read the flags of compile caches. They are on by default for Python programs with a store.

    Returns: None if they are off. Raises: UsageError.
    """
    if args.keep_caches and args.no_keep_caches:
        raise UsageError("--keep-caches and --no-keep-caches: give one of them")
    if args.no_keep_caches:
        return None
    if not args.keep_caches:
        is_default = args.env_store is not None and not args.no_python
        if args.cache_dir and not is_default:
            raise UsageError("--cache-dir is without effect: give --keep-caches as well")
        if not is_default:
            return None
    dirs: dict[str, str] = {}
    for text in args.cache_dir:
        name, mark, path = text.partition("=")
        if not mark or not path or not name or not _NAME_LETTERS.issuperset(name) or "\0" in path:
            raise UsageError(f"--cache-dir {text[:200]!r}: give NAME=DIR, NAME of letters, digits, - and _")
        if name in dirs:
            raise UsageError(f"--cache-dir {text[:200]!r}: {name} is given twice")
        dirs[name] = absolute(path)
        if args.image is not None and (why := why_not_by_default(dirs[name])):
            raise UsageError(f"--cache-dir {text[:200]!r}: {why}; give a directory that is only on this node")
    return CachesOptions(_store(args.env_store, absolute), tuple(dirs.items()), args.env_key or "")


def _paths(given: Sequence[str], flag: str, absolute: Callable[[str], str]) -> tuple[str, ...]:
    for path in given:
        if not path or "\0" in path:
            raise UsageError(f"{flag} {path[:200]!r}: give a path")
    return tuple(map(absolute, given))


def _store(url: str | None, absolute: Callable[[str], str]) -> str:
    if url is None:
        return ""
    from launcher.cli.typed_place import parse_location

    return parse_location(url, "--env-store", "s3://bucket/environments", absolute)


def _seconds(given: float | None, flag: str, default_s: float) -> float:
    if given is None:
        return default_s
    if not 0 <= given < 1e9:
        raise UsageError(f"{flag} {given:g}: give seconds, 0 or more")
    return given


def _age(given: float) -> float:
    if not 0 < given < 1e12:
        raise UsageError(f"--env-max-age {given:g}: give seconds, more than 0")
    return given


def _ways(given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return WAYS
    for way in given:
        if way not in WAYS:
            raise UsageError(f"--env-way {way!r}: the values are {', '.join(WAYS)}")
    return tuple(dict.fromkeys(given))
