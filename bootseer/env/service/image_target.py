"""The environment of a job in an image if the user names no target: a virtual environment that Bootseer creates.

    CACHE/image-envs/NAME/env    on the node, visible at the same path in the image; NAME: from its key

It has the packages of the image's interpreter, and those of set-up on top: the image itself is never changed.
Scripts contain its path, so the path is the same on all nodes of a user.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import shutil
import threading
from collections.abc import Mapping

import msgspec

from bootseer.env.key.keying import make_key
from bootseer.env.restore import used_directories as used_directories
from bootseer.env.restore.used_directories import GOING, UsedDirectory
from bootseer.env.spec import SetupSpec
from bootseer.errors import BootseerError
from bootseer.mounts.sandbox.shared import environments

NAME_LETTERS = 16
OF_JOB = "job-"  # prefix of the name of an environment for one job alone
OF_JOB_OLD_S = 86_400.0  # age since the start of that job, after its end
_DIRECTORY = "env"
# The image's pip works in a virtual environment without pip, but has no program there. The interpreter writes it,
# as an image need not have other programs.
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
    """Return the spec of set-up into a directory of Bootseer.

    Args: python: the image's interpreter, a name or a path. job: unique id of the job, for an environment that
        cannot be cached and is used by one job alone.

    Raises: ConfigError if the directory cannot be created.
    """
    above = environments(environ)
    spec = msgspec.structs.replace(spec, venv_of=python, targets=(os.path.join(above, "_", _DIRECTORY),))
    try:
        name = make_key(spec, environ).key[:NAME_LETTERS]
    except BootseerError:
        # It is not cached; callers that compute the key get the reason.
        said = "\0".join((job, spec.image, spec.cwd, spec.salt, *spec.commands, *spec.inputs))
        name = OF_JOB + hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:NAME_LETTERS]
    return msgspec.structs.replace(spec, targets=(os.path.join(above, name, _DIRECTORY),))


def commands_of(spec: SetupSpec) -> tuple[str, ...]:
    """PURE: return the commands to run in the image: one that creates the virtual environment, then the user's."""
    if not spec.venv_of:
        return spec.commands
    directory = shlex.quote(spec.targets[0])
    venv = f"{shlex.quote(spec.venv_of)} -m venv --system-site-packages --without-pip {directory}"
    return (f"{venv}\n{directory}/bin/python -c {shlex.quote(_MAKE_PIP)}", *spec.commands)


def directory_of(spec: SetupSpec) -> str:
    """PURE: return Bootseer's directory, locked while a job uses it; "" if the user named a target."""
    return os.path.dirname(spec.targets[0]) if spec.venv_of else ""


def clear(spec: SetupSpec, own: UsedDirectory | None = None) -> bool:
    """Empty a directory of Bootseer that is outdated or incomplete. False: a job uses it, so it stays.

    Args: own: the caller's lock of the directory, if it has one; locks of other jobs are still respected.
    Raises: StorageError.
    """
    used = own or UsedDirectory(directory_of(spec))
    try:
        with used.alone() as is_alone:
            if not is_alone:
                return False
            # One rename moves it away; `remove_old` finds leftovers.
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
    """Remove environments that no job has used for a month; return their directories. Raises: ConfigError.

    Environments for one job alone are removed after a day.
    """
    above, name = environments(environ), f"[0-9a-f]{{{NAME_LETTERS}}}"
    return [
        *used_directories.remove_old(above, name),
        *used_directories.remove_old(above, OF_JOB + name, OF_JOB_OLD_S),
    ]
