"""The key of an environment: collects the facts that decide the result of set-up, and reports unknown ones.

In: the spec, the job's environment. Out: `Keyed`. Files are hashed and the interpreter is queried; nothing is
changed. The reads of set-up are known after its first run: until then the key covers the files that its commands
name. Later, lists of reads are stored under the key of all other facts (`guess_key`). Each list gives a key with
the state of its files on this node (`with_reads`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from bootseer.counted import counted
from bootseer.env.key import base as bases
from bootseer.env.key.compiled import machine_facts
from bootseer.env.key.document import KeyDocument, key_of, summarize_reads, to_utf8_text
from bootseer.env.key.inputs import find_inputs
from bootseer.env.key.targets import local_store, resolve_targets
from bootseer.env.parse.redaction import looks_secret, redact_text, redact_variable, secret_values
from bootseer.env.parse.redaction_commands import redact_command
from bootseer.env.reads.current_state import ReadStates
from bootseer.env.reads.read_list import GUESSED, Reads, states_for_key
from bootseer.env.restore.in_place import EMPTY, state_of
from bootseer.env.spec import SetupSpec
from bootseer.errors import ConfigError, KeyUnknown

WHOLE = ". (all of the working folder)"
_UNREADABLE = "cannot be read"  # only until the reads of set-up are known
MAX_UNPINNED_SHOWN = 5
UNPINNED_AGE_S = 7 * 24 * 3600.0

# Variables that decide the results of installers and compilers.
_DECIDING = re.compile(
    r"PIP_\w+|UV_\w+|CONDA_\w+|MAMBA_\w+|POETRY_\w+|PDM_\w+|PIPENV_\w+|HATCH_\w+|SKBUILD_\w+|MATURIN_\w+"
    r"|CMAKE_\w+|NVTE_\w+|DS_BUILD_\w+|FLASH_ATTENTION_\w+|APEX_\w+|SETUPTOOLS_\w+"
    r"|CC|CXX|CPP|LD|AR|FC|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|FFLAGS|ARCHFLAGS|LDSHARED|CPATH|LIBRARY_PATH"
    r"|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|PKG_CONFIG_PATH|CUDA_HOME|CUDA_PATH|CUDACXX|CUDAARCHS|CUDNN_HOME|NCCL_HOME"
    r"|NVCC_PREPEND_FLAGS|NVCC_APPEND_FLAGS|TORCH_CUDA_ARCH_LIST|TORCH_NVCC_FLAGS|FORCE_CUDA|USE_CUDA|BUILD_VERSION"
    r"|ROCM_HOME|ROCM_PATH|PYTORCH_ROCM_ARCH|HIP_PLATFORM|RUSTFLAGS|SOURCE_DATE_EPOCH"
)
# Those of them that do not change the result.
_INDIFFERENT = re.compile(
    r"PIP_(CACHE_DIR|NO_CACHE_DIR|LOG|LOG_FILE|TIMEOUT|DEFAULT_TIMEOUT|RETRIES|RESUME_RETRIES|NO_INPUT|NO_COLOR"
    r"|PROGRESS_BAR|QUIET|VERBOSE|DISABLE_PIP_VERSION_CHECK|ROOT_USER_ACTION|NO_WARN_SCRIPT_LOCATION|PROXY|CERT"
    r"|CLIENT_CERT|BREAK_SYSTEM_PACKAGES|REQUIRE_VIRTUALENV)"
    r"|UV_(CACHE_DIR|NO_CACHE|NO_PROGRESS|HTTP_\w+|CONCURRENT_\w+|LINK_MODE|NATIVE_TLS|COMPILE_BYTECODE\w*|STACK_SIZE"
    r"|LOCK_TIMEOUT|LOG_CONTEXT|RUN_\w+)"
    r"|CONDA_(SHLVL|PROMPT_MODIFIER|EXE|PYTHON_EXE|PKGS_DIRS|ROOT|PREFIX_\d+|CHANGEPS1|DEFAULT_ENV|_\w+)|MAMBA_EXE"
    r"|POETRY_(CACHE_DIR|HOME|NO_INTERACTION|REQUESTS_\w+|INSTALLER_(PARALLEL|MAX_WORKERS)|VIRTUALENVS_\w+"
    r"|KEYRING_ENABLED|SOLVER_LAZY_WHEEL)"
    r"|PDM_(CACHE_DIR|CHECK_UPDATE|LOG_DIR|REQUEST_TIMEOUT|NON_INTERACTIVE|HOME)"
    r"|PIPENV_(CACHE_DIR|VERBOSITY|QUIET|NOSPIN|HIDE_EMOJIS|TIMEOUT|INSTALL_TIMEOUT|MAX_RETRIES|YES|ACTIVE"
    r"|IGNORE_VIRTUALENVS|VIRTUALENV_\w+|VENV_IN_PROJECT)"
    r"|HATCH_(CACHE_DIR|DATA_DIR|QUIET|VERBOSE|NO_COLOR|INTERACTIVE)"
    r"|CMAKE_(BUILD_PARALLEL_LEVEL|COLOR_\w+|EXPORT_COMPILE_COMMANDS)"
)
# Often named in commands, and different at every start.
_PASSING = {"PATH", "_", "SHLVL", "PS1", "LINENO", "RANDOM", "SECONDS", "PPID", "IFS", "VIRTUAL_ENV"}


class Keyed:
    """An environment's key, and facts about it. It contains no secrets.

    Args: guess: all deciding facts but the reads of set-up. guessed: digests of the files that commands name.
    whole:
        of the whole working directory.
    """

    def __init__(
        self,
        guess: KeyDocument,
        guessed: Mapping[str, Callable[[], str]],
        whole: Callable[[], str],
        *,
        cwd: str,
        unpinned: list[str],
        notes: list[str],
        unknown: list[str],
        max_age_s: float | None,
        targets: list[str],
        excluded: list[str],
        editables: list[str],
        is_plain: bool,
        only_installs: bool,
        needs_whole: bool,
    ) -> None:
        self.guess, self._cwd = guess, cwd
        self._guessed = {name: _once(digest) for name, digest in guessed.items()}
        self._whole = _once(whole)
        self.unpinned = unpinned  # requirements whose result may change with time
        self.notes = notes  # for the user, one line each
        self.unknown = unknown  # the same, if the reads of set-up are not observed
        self.max_age_s = max_age_s  # of a snapshot of this key
        self.targets = targets  # resolved
        self.excluded = excluded  # directories that are never inputs: the targets, the store
        self.editables = editables  # directories that commands install in place; every node needs them there
        self.is_plain = is_plain  # only pip, without builds of the user's code
        self.only_installs = only_installs  # plain, and it creates no other readable files
        self.needs_whole = needs_whole  # programs may read any file, and none are declared
        self.reads: Reads | None = None  # from which the key is made
        self._document: KeyDocument | None = None

    @cached_property
    def guess_key(self) -> str:
        """The key under which lists of reads are stored."""
        return key_of(self.guess)

    @property
    def document(self) -> KeyDocument:
        """The document with the reads of set-up; until they are known, with the files that its commands name."""
        if self._document is None:
            self._document = self._with_guess(is_whole=False, is_first=True)
        return self._document

    @cached_property
    def key(self) -> str:
        return key_of(self.document)

    def aged(self, unpinned: list[str], max_age_s: float) -> Keyed:
        """Return a copy with the unpinned requirements that are known after set-up."""
        assert self.reads is not None, "set-up has run"
        made = self._with(self.reads, self.document)
        made.unpinned, made.max_age_s = unpinned, max_age_s
        return made

    def look(self, environ: Mapping[str, str], *, is_logged: bool = False) -> ReadStates:
        """Return a view of the files on this node that set-up reads. Args: is_logged: that they are large."""
        return ReadStates(self._cwd, environ, self.excluded, is_logged=is_logged)

    def with_reads(self, reads: Reads, now: ReadStates) -> Keyed:
        """Return the key for a list of reads and their state on this node. Raises: KeyUnknown if too large."""
        if reads.how == GUESSED:
            return self._with(reads, self._with_guess(is_whole=reads.is_whole))
        return self.with_states(reads, states_for_key(reads, now.states(reads)))

    def with_states(self, reads: Reads, states: Mapping[str, str]) -> Keyed:
        """Return the key for a list of reads with known states, by label."""
        cwd = to_utf8_text(os.path.realpath(self._cwd)) if reads.is_placed else self.guess.cwd
        document = msgspec.structs.replace(
            self.guess, seen=reads.how, reads=summarize_reads(states), cwd=cwd, guess=self.guess_key
        )
        return self._with(reads, document)

    def _with(self, reads: Reads, document: KeyDocument) -> Keyed:
        made = Keyed(
            self.guess,
            self._guessed,
            self._whole,
            cwd=self._cwd,
            unpinned=self.unpinned,
            notes=self.notes,
            unknown=self.unknown,
            max_age_s=self.max_age_s,
            targets=self.targets,
            excluded=self.excluded,
            editables=self.editables,
            is_plain=self.is_plain,
            only_installs=self.only_installs,
            needs_whole=self.needs_whole,
        )
        made.reads, made._document = reads, document
        return made

    def _with_guess(self, *, is_whole: bool, is_first: bool = False) -> KeyDocument:
        """Return the document of the first guess. Args: is_first: set-up has not run, and may read other files."""
        digests = {}
        for name, digest in self._guessed.items():
            try:
                digests[name] = digest()
            except KeyUnknown:
                if not is_first:
                    raise
                digests[name] = _UNREADABLE
        if is_whole:
            digests[WHOLE] = self._whole()
        inputs = dict(sorted((self.guess.inputs | digests).items()))
        guess = "" if is_first else self.guess_key
        return msgspec.structs.replace(self.guess, inputs=inputs, seen=GUESSED, guess=guess)

    def hash_guess(self) -> None:
        """Hash the files that commands name, and the working directory if needed: set-up may change both."""
        for digest in (*self._guessed.values(), *([self._whole] if self.needs_whole else [])):
            try:
                digest()
            except KeyUnknown:
                continue

    @property
    def guessed_names(self) -> list[str]:
        """The names of the files that the commands name."""
        return list(self._guessed)


def make_key(
    spec: SetupSpec,
    environ: Mapping[str, str],
    known_base: Mapping[str, str] | None = None,
) -> Keyed:
    """Make the key. `environ`: of the job.

    `known_base`: `document.base` of the start that set up the targets, if they are unchanged since. So a node that
    is set up keeps its key. Facts outside the targets are still collected.

    Raises: ConfigError for an invalid spec; KeyUnknown if a fact cannot be determined; LaunchError if the
        interpreter does not answer.
    """
    if spec.in_image and not spec.image:
        raise KeyUnknown("the image is a directory of this node, without a digest of its content")
    asked = None
    if spec.python and not spec.in_image and not _is_made_by_setup(spec):
        asked = bases.probe_interpreter(spec.python, environ, spec.cwd)
    targets = resolve_targets(spec.targets, asked, spec.python, environ, spec.store)
    markers: Mapping[str, str] = {}
    if spec.in_image:
        # The directories are the node's: their content is not part of the image.
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
        commands=[redact_command(to_utf8_text(command), secrets) for command in spec.commands],
        targets=targets,
        inputs=inputs.declared,
        base=base,
        variables=_variables(_inactive(environ, targets), names, secrets),
        salt=to_utf8_text(spec.salt),
        # Unknown programs may read any file below it, unless the user has declared their inputs.
        cwd="" if inputs.is_known or spec.inputs else to_utf8_text(os.path.realpath(spec.cwd)),
    )
    unpinned = list(dict.fromkeys(redact_text(to_utf8_text(text), secrets) for text in inputs.unpinned))
    age_s = spec.max_age_s
    if age_s is None and unpinned:
        age_s = UNPINNED_AGE_S
    notes = [redact_text(to_utf8_text(note), secrets) for note in inputs.notes]
    notes += [
        f"warning: an argument of set-up command {number} seems to be a secret, and is stored in the key in plain"
        " text; put it into a variable with a name of secrets, such as MY_TOKEN"
        for number, command in enumerate(document.commands, 1)
        if looks_secret(command)
    ]
    return Keyed(
        document,
        inputs.guessed,
        inputs.whole,
        cwd=spec.cwd,
        unpinned=unpinned,
        notes=notes,
        unknown=[redact_text(to_utf8_text(note), secrets) for note in inputs.unknown],
        max_age_s=age_s,
        targets=targets,
        excluded=excluded,
        editables=inputs.editables,
        is_plain=inputs.is_plain,
        only_installs=inputs.only_installs,
        needs_whole=not inputs.is_known and not spec.inputs,
    )


def unpinned_line(unpinned: Sequence[str], max_age_s: float | None) -> str:
    """PURE: return the warning about unpinned requirements."""
    shown = ", ".join(unpinned[:MAX_UNPINNED_SHOWN])
    more = len(unpinned) - MAX_UNPINNED_SHOWN
    others = f" and {more} more" if more > 0 else ""
    age = "" if max_age_s is None else f", so the snapshot is used for {counted(max_age_s / 86400, 'day')}"
    return f"warning: set-up is not pinned ({shown}{others}): its result may change with time{age}"


def _once(digest: Callable[[], str]) -> Callable[[], str]:
    """Return a function that computes the digest once, and then repeats it, or its error."""
    known: list[str | KeyUnknown] = []

    def give() -> str:
        if not known:
            try:
                known.append(digest())
            except KeyUnknown as error:
                known.append(error)
        found = known[0]
        if isinstance(found, KeyUnknown):
            raise found
        return found

    return give


def _is_made_by_setup(spec: SetupSpec) -> bool:
    """Return whether the interpreter does not exist yet, and set-up creates it in a target."""
    if os.path.exists(spec.python):
        return False
    directory = os.path.realpath(os.path.dirname(spec.python))
    if bases.is_below(directory, [os.path.realpath(target) for target in spec.targets]):
        return True
    raise ConfigError(
        f"{spec.python}: there is no such interpreter; if set-up creates it, name its target with --setup-target"
    )


def _inactive(environ: Mapping[str, str], targets: Iterable[str]) -> dict[str, str]:
    """Remove the activation of a target: set-up always gets its target
    (bootseer.env.service.commands.setup_environ).
    """
    own = set(targets)
    return {
        name: value
        for name, value in environ.items()
        if name != "CONDA_PREFIX" or os.path.realpath(value) not in own
    }


def _variables(environ: Mapping[str, str], names: Iterable[str], secrets: Iterable[str]) -> dict[str, str]:
    chosen = {name for name in environ if _DECIDING.fullmatch(name) and not _INDIFFERENT.fullmatch(name)}
    chosen |= {name for name in names if name in environ and name not in _PASSING}
    return {
        to_utf8_text(name): redact_variable(name, to_utf8_text(environ[name]), secrets) for name in sorted(chosen)
    }
