"""The key of an environment: collects all that decides what set-up makes, and says what the key cannot know.

In: the spec, the job's environment. Out: `Keyed`. Files are hashed and the interpreter is
asked; nothing is changed. Run once a start, on one node: its key holds for all nodes of the job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.env import base as bases
from bootseer.env.compiled import machine_facts
from bootseer.env.document import KeyDocument, key_of, plain
from bootseer.env.inputs import find_inputs
from bootseer.env.redaction import redact_text, redact_variable, secret_values
from bootseer.env.redaction_commands import looks_secret, redact_command
from bootseer.env.restore_there import EMPTY, state_of
from bootseer.env.spec import SetupSpec
from bootseer.env.targets import local_store, resolve_targets
from bootseer.errors import ConfigError, KeyUnknown

UNPINNED_AGE_S = 7 * 24 * 3600.0

# Variables that decide what installers and compilers make.
_DECIDING = re.compile(
    r"PIP_\w+|UV_\w+|CONDA_\w+|MAMBA_\w+|CMAKE_\w+|NVTE_\w+|DS_BUILD_\w+|FLASH_ATTENTION_\w+|APEX_\w+|SETUPTOOLS_\w+"
    r"|CC|CXX|CPP|LD|AR|FC|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|FFLAGS|ARCHFLAGS|LDSHARED|CPATH|LIBRARY_PATH"
    r"|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|PKG_CONFIG_PATH|CUDA_HOME|CUDA_PATH|CUDACXX|CUDAARCHS|CUDNN_HOME|NCCL_HOME"
    r"|NVCC_PREPEND_FLAGS|NVCC_APPEND_FLAGS|TORCH_CUDA_ARCH_LIST|TORCH_NVCC_FLAGS|FORCE_CUDA|USE_CUDA|BUILD_VERSION"
    r"|ROCM_HOME|ROCM_PATH|PYTORCH_ROCM_ARCH|HIP_PLATFORM|RUSTFLAGS|SOURCE_DATE_EPOCH"
)
# Those of them that change how it is made, not what.
_INDIFFERENT = re.compile(
    r"PIP_(CACHE_DIR|NO_CACHE_DIR|LOG|LOG_FILE|TIMEOUT|DEFAULT_TIMEOUT|RETRIES|RESUME_RETRIES|NO_INPUT|NO_COLOR"
    r"|PROGRESS_BAR|QUIET|VERBOSE|DISABLE_PIP_VERSION_CHECK|ROOT_USER_ACTION|NO_WARN_SCRIPT_LOCATION|PROXY|CERT"
    r"|CLIENT_CERT|BREAK_SYSTEM_PACKAGES|REQUIRE_VIRTUALENV)"
    r"|UV_(CACHE_DIR|NO_CACHE|NO_PROGRESS|HTTP_\w+|CONCURRENT_\w+|LINK_MODE|NATIVE_TLS|COMPILE_BYTECODE\w*|STACK_SIZE"
    r"|LOCK_TIMEOUT|LOG_CONTEXT|RUN_\w+)"
    r"|CONDA_(SHLVL|PROMPT_MODIFIER|EXE|PYTHON_EXE|PKGS_DIRS|ROOT|PREFIX_\d+|CHANGEPS1|DEFAULT_ENV|_\w+)|MAMBA_EXE"
    r"|CMAKE_(BUILD_PARALLEL_LEVEL|COLOR_\w+|EXPORT_COMPILE_COMMANDS)"
)
# Named in commands often, and different at every start.
_PASSING = {"PATH", "_", "SHLVL", "PS1", "LINENO", "RANDOM", "SECONDS", "PPID", "IFS", "VIRTUAL_ENV"}


class Keyed(NamedTuple):
    """An environment's key, and what there is to know about it. Nothing here holds a secret."""

    document: KeyDocument
    key: str
    unpinned: list[str]  # requirements that give another package another day
    notes: list[str]  # for the user, one line each
    max_age_s: float | None  # of a snapshot of this key
    targets: list[str]  # resolved
    editables: list[str]  # folders that commands install in place; every node has to have them at the same path


def make_key(
    spec: SetupSpec,
    environ: Mapping[str, str],
    known_base: Mapping[str, str] | None = None,
) -> Keyed:
    """`environ`: of the job.

    `known_base`: `document.base` of the start that set up the targets, when they are unchanged since: so that a
    node that is set up has the key that it had before. What lies outside the targets is looked at all the same.

    Raises: ConfigError for what cannot be keyed; KeyUnknown for what nobody can tell; LaunchError when the
        interpreter does not answer.
    """
    if spec.in_image and not spec.image:
        raise KeyUnknown("the image is a folder of this node, and nothing says what is in it")
    asked = None
    if spec.python and not spec.in_image and not _is_made_by_setup(spec):
        asked = bases.ask_interpreter(spec.python, environ, spec.cwd)
    targets = resolve_targets(spec.targets, asked, spec.python, environ, spec.store)
    markers: Mapping[str, str] = {}
    if spec.in_image:
        # The folders are the node's: what is in them is not the image's.
        states = {target: state for target in targets if (state := state_of(target)) != EMPTY}
        base = bases.of_image(spec.image, spec.venv_of, states)
    elif asked is None:
        base = bases.of_node()
    else:
        base = bases.of_interpreter(asked, spec.python, targets)
        markers = bases.markers(asked)
    if known_base is not None:
        base = bases.with_known(base, known_base)
    excluded = [*targets, *filter(None, [local_store(spec.store)])]
    inputs = find_inputs(spec, environ, excluded, markers)
    if inputs.may_compile:
        base = base | machine_facts(environ, in_image=spec.in_image)
    secrets = secret_values(environ, inputs.secret_variables)
    names = [*spec.variables, *inputs.variables]
    document = KeyDocument(
        commands=[redact_command(plain(command), secrets) for command in spec.commands],
        targets=targets,
        inputs=inputs.digests,
        base=base,
        variables=_variables(_inactive(environ, targets), names, secrets),
        salt=plain(spec.salt),
        # Programs of which nothing is known may read anything below it, unless the user said what they read.
        cwd="" if inputs.is_known or spec.inputs else plain(os.path.realpath(spec.cwd)),
    )
    unpinned = list(dict.fromkeys(redact_text(plain(text), secrets) for text in inputs.unpinned))
    age_s = spec.max_age_s
    if age_s is None and unpinned:
        age_s = UNPINNED_AGE_S
    notes = [redact_text(plain(note), secrets) for note in inputs.notes]
    notes += [
        f"warning: a word of set-up command {number} looks like a secret, and is stored in clear in the key: "
        "put it into a variable that is named for secrets, as MY_TOKEN"
        for number, command in enumerate(document.commands, 1)
        if looks_secret(command)
    ]
    return Keyed(document, key_of(document), unpinned, notes, age_s, targets, inputs.editables)


def _is_made_by_setup(spec: SetupSpec) -> bool:
    """Whether the interpreter is not there yet and lies where set-up makes it."""
    if os.path.exists(spec.python):
        return False
    folder = os.path.realpath(os.path.dirname(spec.python))
    if bases.is_below(folder, [os.path.realpath(target) for target in spec.targets]):
        return True
    raise ConfigError(
        f"{spec.python}: there is no such interpreter; if set-up makes it, name its folder by --setup-target"
    )


def _inactive(environ: Mapping[str, str], targets: Iterable[str]) -> dict[str, str]:
    """As if no target was activated: set-up is told of its target in any case (setup_run.setup_environ)."""
    own = set(targets)
    return {
        name: value
        for name, value in environ.items()
        if name != "CONDA_PREFIX" or os.path.realpath(value) not in own
    }


def _variables(environ: Mapping[str, str], names: Iterable[str], secrets: Iterable[str]) -> dict[str, str]:
    chosen = {name for name in environ if _DECIDING.fullmatch(name) and not _INDIFFERENT.fullmatch(name)}
    chosen |= {name for name in names if name in environ and name not in _PASSING}
    return {plain(name): redact_variable(name, plain(environ[name]), secrets) for name in sorted(chosen)}
