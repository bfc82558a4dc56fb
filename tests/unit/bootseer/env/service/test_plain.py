"""Which errors end a job with --setup, and which cost only the time that set-up takes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from bootseer.env.service.plain import error_line, is_damage, is_user_error, plain_targets
from bootseer.env.spec import SetupSpec
from bootseer.errors import (
    ConfigError,
    DigestMismatch,
    FormatVersion,
    KeyUnknown,
    LaunchError,
    NotFound,
    PermissionDenied,
    SetupFailed,
    SourceChanged,
    StorageTimeout,
    Truncated,
    Unavailable,
    Untrusted,
)


@pytest.mark.parametrize("kind", [ConfigError, SetupFailed, StorageTimeout])
def test_what_the_user_has_to_recover_ends_the_job(kind: type[Exception]) -> None:
    assert is_user_error(kind("why"))


@pytest.mark.parametrize("kind", [KeyUnknown, LaunchError, PermissionDenied, Unavailable, DigestMismatch, OSError])
def test_what_only_keeping_it_needs_does_not(kind: type[Exception]) -> None:
    assert not is_user_error(kind("why"))


def test_damage_is_what_building_again_mends() -> None:
    assert all(is_damage(kind("why")) for kind in (DigestMismatch, Truncated, NotFound))
    spared = (Untrusted, FormatVersion, SourceChanged, Unavailable, PermissionDenied, ConfigError)
    assert not any(is_damage(kind("why")) for kind in spared)


def test_errors_of_the_system_are_one_line() -> None:
    assert error_line(OSError(30, os.strerror(30), "/cache")) == "/cache: Read-only file system"
    assert error_line(ConfigError("a: b")) == "a: b"


def test_targets_without_a_word_of_the_interpreter(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    python = os.fspath(venv / "bin" / "python")
    spec = SetupSpec(commands=("true",), python=python, cwd=os.fspath(tmp_path))
    assert plain_targets(spec, {}) == [os.fspath(venv)]
    with pytest.raises(ConfigError, match="--setup-target"):
        plain_targets(msgspec.structs.replace(spec, python="/usr/bin/python3"), {})
    with pytest.raises(ConfigError, match="belongs to the system"):
        plain_targets(msgspec.structs.replace(spec, targets=("/etc/x",)), {})
