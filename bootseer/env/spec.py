"""What the user asked for: which commands make the environment, from what, into which folders. Pure.

Every field comes from a flag of bootrun; what cannot be is a ConfigError that names the flag.
"""

from __future__ import annotations

import msgspec

from bootseer.errors import ConfigError

MOST_COMMANDS = 256
MOST_COMMAND_BYTES = 64 << 10
MOST_PATHS = 1024
MOST_SALT_BYTES = 1024


class SetupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Paths are absolute. Raises ConfigError when it is made of what cannot be."""

    commands: tuple[str, ...]  # each one line for /bin/sh -e -c, as the user wrote them; run in this order
    inputs: tuple[str, ...] = ()  # declared files or folders
    targets: tuple[
        str, ...
    ] = ()  # folders that the commands change; empty: the prefix of `python`, if it has its own
    store: str = ""  # URL of the environment store
    python: str = ""  # the ranks' interpreter; "" for none
    variables: tuple[str, ...] = ()  # further names of variables that decide the result
    salt: str = ""  # --env-key
    max_age_s: float | None = None  # None: 7 days when something is not pinned, else for ever
    timeout_s: float = 3600.0  # of all set-up commands
    wait_s: float = 600.0  # for another builder
    cwd: str = "/"  # where the commands run
    in_image: bool = False  # the commands and ranks run in an image
    image: str = ""  # digest of its tree; "" if nothing says what is in it
    venv_of: str = ""  # set-up begins with a virtual environment of this interpreter of the image in its target

    def __post_init__(self) -> None:
        if not self.commands:
            raise ConfigError("there is no set-up command: give one by --setup COMMAND")
        if len(self.commands) > MOST_COMMANDS:
            raise ConfigError(f"--setup: {len(self.commands)} commands; at most {MOST_COMMANDS}: use a script")
        for number, command in enumerate(self.commands, 1):
            # Not shown: a command may hold secrets.
            if not command.strip() or "\0" in command:
                raise ConfigError(f"--setup: command {number} is empty or has a NUL character")
            if len(command.encode("utf-8", "surrogateescape")) > MOST_COMMAND_BYTES:
                raise ConfigError(
                    f"--setup: command {number} is longer than {MOST_COMMAND_BYTES} bytes: use a script"
                )
        for flag, paths in (("--setup-input", self.inputs), ("--setup-target", self.targets)):
            if len(paths) > MOST_PATHS:
                raise ConfigError(f"{flag}: {len(paths)} paths; at most {MOST_PATHS}: name a folder")
            for path in paths:
                _check_path(flag, path)
        _check_path("the working directory", self.cwd)
        if self.python:
            _check_path("the ranks' interpreter", self.python)
        for name in self.variables:
            if not name or "=" in name or "\0" in name:
                raise ConfigError(f"--setup-variable: {name[:80]!r} is no name of a variable")
        if len(self.salt.encode("utf-8", "surrogateescape")) > MOST_SALT_BYTES:
            raise ConfigError(f"--env-key: longer than {MOST_SALT_BYTES} bytes")
        for flag, seconds in (("--setup-timeout", self.timeout_s), ("--setup-wait", self.wait_s)):
            if not seconds >= 0:
                raise ConfigError(f"{flag}: {seconds:g} s: a number of seconds from 0 on")
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ConfigError(f"--env-max-age: {self.max_age_s:g} s: a number of seconds above 0")


def _check_path(flag: str, path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"{flag}: {path[:200]!r} is no absolute path")
