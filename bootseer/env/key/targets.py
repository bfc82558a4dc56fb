"""Validation of the directories that set-up may change, before they are walked, captured or restored into.

In: the user's paths. Out: absolute resolved paths. Raises: ConfigError with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from bootseer.env.key.base import Interpreter, is_below
from bootseer.errors import ConfigError
from bootseer.storage.paths import scheme_of

# No environment is in these.
_SYSTEM = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/proc",
    "/sys",
    "/dev",
    "/boot",
    "/run",
)
# Shared directories; directories below them may be targets.
_SHARED = (
    *("/", "/usr", "/usr/local/bin", "/home", "/root", "/opt", "/var", "/srv", "/mnt", "/media"),
    *("/tmp", "/var/tmp"),  # noqa: S108
)
_MEMORY = ("/dev/shm/", "/run/user/")  # noqa: S108  tmpfs, where users may well put an environment
_INSTALL_DIRECTORIES = ("site-packages", "dist-packages")


def resolve_targets(
    asked: Sequence[str], interpreter: Interpreter | None, python: str, environ: Mapping[str, str], store: str = ""
) -> list[str]:
    """Resolve targets. Args: asked: absolute paths; if empty, the interpreter's own environment."""
    if not asked:
        return [check_target(_default(interpreter, python), environ, store)]
    found: list[str] = []
    for path in asked:
        target = check_target(path, environ, store)
        for other in found:
            if is_below(target, [other]) or is_below(other, [target]):
                raise ConfigError(
                    f"--setup-target: {target} and {other}: one contains the other; name the outer one"
                )
        found.append(target)
    return found


def check_target(path: str, environ: Mapping[str, str], store: str = "") -> str:
    """Return the resolved path; it need not exist. Raises: ConfigError if it can never be an environment."""
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"--setup-target: {path[:200]!r} is not an absolute path")
    target = os.path.realpath(path)
    try:
        target.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--setup-target: {target!r} is not UTF-8; use another directory") from None
    shown = target if target == path else f"{path} ({target})"
    home = os.path.realpath(environ.get("HOME") or "/root")
    if target in _SHARED or target == home or (os.path.dirname(target) == "/home"):
        raise ConfigError(f"--setup-target: {shown} contains more than an environment; name a directory below it")
    is_own = _is_install_directory(target) or target.startswith(_MEMORY)
    if is_below(target, [*_SYSTEM, *map(os.path.realpath, _SYSTEM)]) and not is_own:
        raise ConfigError(f"--setup-target: {shown} belongs to the system; name an environment's own directory")
    if is_below(target, ["/usr"]) and not is_below(target, ["/usr/local"]) and not is_own:
        raise ConfigError(f"--setup-target: {shown} belongs to the system; name /usr/local or a site-packages")
    if ".git" in target.split("/"):
        raise ConfigError(f"--setup-target: {shown} belongs to a repository; name an environment's own directory")
    if os.path.exists(target) and not os.path.isdir(target):
        raise ConfigError(f"--setup-target: {shown} is not a directory")
    place = local_store(store)
    if place and (is_below(place, [target]) or is_below(target, [place])):
        raise ConfigError(f"--setup-target: {shown} and the environment store {place}: one contains the other")
    return target


def local_store(url: str) -> str:
    """Return the resolved directory of an environment store on this machine; "" for a remote one."""
    if not url or scheme_of(url) not in ("", "file", "local"):
        return ""
    return os.path.realpath(unquote(url.partition("://")[2]) if "://" in url else url)


def _default(interpreter: Interpreter | None, python: str) -> str:
    if interpreter is None:
        reason = f"{python} is not inspected before set-up" if python else "the ranks do not run Python"
        raise ConfigError(f"--setup: {reason}; name the directories that set-up changes by --setup-target DIR")
    if not interpreter.is_venv and not interpreter.is_conda:
        raise ConfigError(
            f"--setup: {python} has no environment of its own ({interpreter.prefix} is the system's or shared); "
            f"name the directories that set-up changes, as --setup-target {interpreter.purelib}"
        )
    return interpreter.prefix


def _is_install_directory(target: str) -> bool:
    return any(name in target.split("/") for name in _INSTALL_DIRECTORIES)
