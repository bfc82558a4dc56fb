"""The environment of a job in an image, where the user names no folder for it: a virtual environment of our own.

    CACHE/image-envs/NAME/env    on the node, seen at the same path in the image; NAME: by all that decides it

It has what the image's interpreter has, and what set-up installs lies above that: the image itself is never
changed. As its path stands in scripts, it is the same on all nodes of a user.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import threading
from collections.abc import Mapping, Sequence

import msgspec

from bootseer.env import used_folders
from bootseer.env.keying import make_key
from bootseer.env.spec import SetupSpec
from bootseer.env.used_folders import GOING, UsedFolder
from bootseer.errors import BootseerError
from bootseer.mounts.image_shared import environments

NAME_LETTERS = 16
OF_JOB = "job-"  # begins the name of what is set up for one job alone
OF_JOB_OLD_S = 86_400.0  # since that job began, and it has ended
_FOLDER = "env"
# pip of the image works in a virtual environment that has none of its own, but it has no program there. Made by
# the interpreter: an image need not have other programs.
_MAKE_PIP = """\
import os, sys
try:
    import pip
except ImportError:
    sys.exit()
path = os.path.join(sys.prefix, "bin", "pip")
with open(path, "w") as file:
    file.write("#!" + sys.executable + "\\nimport sys\\nfrom pip._internal.cli.main import main\\n")
    file.write("sys.exit(main())\\n")
os.chmod(path, 0o755)
"""


def with_own_target(spec: SetupSpec, python: str, environ: Mapping[str, str], job: str = "") -> SetupSpec:
    """The spec of set-up into a folder of our own.

    Args: python: the image's interpreter, a name or a path. job: what no other job has: what cannot be kept is
        set up for one job alone.

    Raises: ConfigError when there is no place for it.
    """
    above = environments(environ)
    spec = msgspec.structs.replace(spec, venv_of=python, targets=(os.path.join(above, "_", _FOLDER),))
    try:
        name = make_key(spec, environ).key[:NAME_LETTERS]
    except BootseerError:
        # It is not kept, whoever asks for the key learns why.
        said = "\0".join((job, spec.image, spec.cwd, spec.salt, *spec.commands, *spec.inputs))
        name = OF_JOB + hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:NAME_LETTERS]
    return msgspec.structs.replace(spec, targets=(os.path.join(above, name, _FOLDER),))


def commands_of(spec: SetupSpec) -> tuple[str, ...]:
    """PURE: what is run, in the image: the user's commands, after one that makes the virtual environment."""
    if not spec.venv_of:
        return spec.commands
    folder = shlex.quote(spec.targets[0])
    venv = f"{shlex.quote(spec.venv_of)} -m venv --system-site-packages --without-pip {folder}"
    return (f"{venv}\n{folder}/bin/python -c {shlex.quote(_MAKE_PIP)}", *spec.commands)


def folder_of(spec: SetupSpec) -> str:
    """PURE: of ours, that is in use as long as a job uses the environment; "" where the user named one."""
    return os.path.dirname(spec.targets[0]) if spec.venv_of else ""


def python_of(targets: Sequence[str], seen_by: int = 0) -> str:
    """The interpreter that set-up has made in a target, as it is seen in the image; "" for none.

    Args: seen_by: pid of a process that sees the targets; 0: this one does.
    """
    root = f"/proc/{seen_by}/root" if seen_by else ""
    for target in targets:
        python = os.path.join(target, "bin", "python")
        # Its link may lead to what is there in the image alone.
        if os.path.isfile(f"{root}{target}/pyvenv.cfg") and os.path.lexists(root + python):
            return python
    return ""


def clear(spec: SetupSpec, own: UsedFolder | None = None) -> bool:
    """Empties a folder of ours of what is of no use: too old, or half made. False: a job uses it, and it stays.

    Args: own: who asks has it in use already; what another job is about to do there is seen by its own.
    Raises: StorageError.
    """
    used = own or UsedFolder(folder_of(spec))
    try:
        with used.alone() as is_alone:
            if not is_alone:
                return False
            # In one step, and out of the way; what is left of it `remove_old` finds.
            going = os.path.join(os.path.dirname(used.path), f"{GOING}{secrets.token_hex(8)}")
            try:
                os.rename(spec.targets[0], going)
            except OSError:
                return not os.path.lexists(spec.targets[0])
    finally:
        if own is None:
            used.close()
    threading.Thread(target=shutil.rmtree, args=(going,), kwargs={"ignore_errors": True}, daemon=True).start()
    return True


def remove_old(environ: Mapping[str, str]) -> list[str]:
    """Takes away environments that no job has used for a month; gives their folders. Raises: ConfigError.

    Nor does another job use what was set up for one alone: that goes after a day.
    """
    above, name = environments(environ), f"[0-9a-f]{{{NAME_LETTERS}}}"
    return [
        *used_folders.remove_old(above, name),
        *used_folders.remove_old(above, OF_JOB + name, OF_JOB_OLD_S),
    ]
