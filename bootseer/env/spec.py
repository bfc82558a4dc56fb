"""The user's settings for set-up: commands, inputs, targets. Pure.

Every field comes from a flag of bootrun; an invalid value raises a ConfigError that names the flag.
"""

from __future__ import annotations

import msgspec

from bootseer.errors import ConfigError

MAX_COMMANDS = 256
MAX_COMMAND_BYTES = 64 << 10
MAX_PATHS = 1024
MAX_SALT_BYTES = 1024


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for set-up. Paths are absolute. Raises: ConfigError for invalid values."""

    commands: tuple[str, ...]  # each one line for /bin/sh -e -c, as the user wrote them; run in this order
    inputs: tuple[str, ...] = ()  # declared files or directories
    targets: tuple[
        str, ...
    ] = ()  # directories that the commands change; empty: the prefix of `python`, if it has its own
    store: str = ""  # URL of the environment store
    python: str = ""  # the ranks' interpreter; "" for none
    variables: tuple[str, ...] = ()  # further variables that are part of the key
    salt: str = ""  # --env-key
    max_age_s: float | None = None  # None: 7 days if a package is not pinned, else unlimited
    timeout_s: float = 3600.0  # for all set-up commands together
    wait_s: float = 600.0  # for another builder
    cwd: str = "/"  # where the commands run
    in_image: bool = False  # the commands and ranks run in an image
    image: str = ""  # digest of its tree; "" if unknown
    # interpreter of the image; set-up begins by creating a virtual environment of it in its target
    venv_of: str = ""

    def __post_init__(self) -> None:
        if not self.commands:
            raise ConfigError("no set-up command is given; add --setup COMMAND")
        if len(self.commands) > MAX_COMMANDS:
            raise ConfigError(f"--setup: {len(self.commands)} commands, more than {MAX_COMMANDS}; use a script")
        for number, command in enumerate(self.commands, 1):
            # Not shown: a command may contain secrets.
            if not command.strip() or "\0" in command:
                raise ConfigError(f"--setup: command {number} is empty or has a NUL character")
            if len(command.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
                raise ConfigError(
                    f"--setup: command {number} is longer than {MAX_COMMAND_BYTES} bytes; use a script"
                )
        for flag, paths in (("--setup-input", self.inputs), ("--setup-target", self.targets)):
            if len(paths) > MAX_PATHS:
                raise ConfigError(f"{flag}: {len(paths)} paths, more than {MAX_PATHS}; name a directory")
            for path in paths:
                _check_path(flag, path)
        _check_path("the working directory", self.cwd)
        if self.python:
            _check_path("the ranks' interpreter", self.python)
        for name in self.variables:
            if not name or "=" in name or "\0" in name:
                raise ConfigError(f"--setup-variable: {name[:80]!r} is not a variable name")
        if len(self.salt.encode("utf-8", "surrogateescape")) > MAX_SALT_BYTES:
            raise ConfigError(f"--env-key: longer than {MAX_SALT_BYTES} bytes")
        for flag, seconds in (("--setup-timeout", self.timeout_s), ("--setup-wait", self.wait_s)):
            if not seconds >= 0:
                raise ConfigError(f"{flag}: {seconds:g} s: must not be negative")
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ConfigError(f"--env-max-age: {self.max_age_s:g} s: must be above 0")


def _check_path(flag: str, path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{flag}: {path[:200]!r} is not an absolute path")
