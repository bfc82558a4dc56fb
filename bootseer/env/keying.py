"""The key of an environment: collects all that decides what set-up makes, and says what the key cannot know.

In: the spec, the job's environment. Out: `Keyed`. Files are hashed and the interpreter is asked; nothing is
changed. What set-up reads is known when it has run once: until then the key has what its commands name. Then lists
of reads are kept under the key of all the rest (`guess_key`), and each gives a key with what lies under its names
on this node (`with_reads`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from bootseer.counted import counted
from bootseer.env import base as bases
from bootseer.env.compiled import machine_facts
from bootseer.env.document import KeyDocument, few, key_of, plain
from bootseer.env.inputs import find_inputs
from bootseer.env.reads import GUESSED, Reads, states_for_key
from bootseer.env.reads_now import Now
from bootseer.env.redaction import looks_secret, redact_text, redact_variable, secret_values
from bootseer.env.redaction_commands import redact_command
from bootseer.env.restore_there import EMPTY, state_of
from bootseer.env.spec import SetupSpec
from bootseer.env.targets import local_store, resolve_targets
from bootseer.errors import ConfigError, KeyUnknown

WHOLE = ". (all of the working folder)"
_TOO_MUCH = "cannot be read"  # only until it is known what set-up reads
MOST_UNPINNED_TOLD = 5
UNPINNED_AGE_S = 7 * 24 * 3600.0

# Variables that decide what installers and compilers make.
_DECIDING = re.compile(
    r"PIP_\w+|UV_\w+|CONDA_\w+|MAMBA_\w+|POETRY_\w+|PDM_\w+|PIPENV_\w+|HATCH_\w+|SKBUILD_\w+|MATURIN_\w+"
    r"|CMAKE_\w+|NVTE_\w+|DS_BUILD_\w+|FLASH_ATTENTION_\w+|APEX_\w+|SETUPTOOLS_\w+"
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
    r"|POETRY_(CACHE_DIR|HOME|NO_INTERACTION|REQUESTS_\w+|INSTALLER_(PARALLEL|MAX_WORKERS)|VIRTUALENVS_\w+"
    r"|KEYRING_ENABLED|SOLVER_LAZY_WHEEL)"
    r"|PDM_(CACHE_DIR|CHECK_UPDATE|LOG_DIR|REQUEST_TIMEOUT|NON_INTERACTIVE|HOME)"
    r"|PIPENV_(CACHE_DIR|VERBOSITY|QUIET|NOSPIN|HIDE_EMOJIS|TIMEOUT|INSTALL_TIMEOUT|MAX_RETRIES|YES|ACTIVE"
    r"|IGNORE_VIRTUALENVS|VIRTUALENV_\w+|VENV_IN_PROJECT)"
    r"|HATCH_(CACHE_DIR|DATA_DIR|QUIET|VERBOSE|NO_COLOR|INTERACTIVE)"
    r"|CMAKE_(BUILD_PARALLEL_LEVEL|COLOR_\w+|EXPORT_COMPILE_COMMANDS)"
)
# Named in commands often, and different at every start.
_PASSING = {"PATH", "_", "SHLVL", "PS1", "LINENO", "RANDOM", "SECONDS", "PPID", "IFS", "VIRTUAL_ENV"}


class Keyed:
    """An environment's key, and what there is to know about it. Nothing here holds a secret.

    Args: guess: all that decides but what set-up reads. guessed: digests of what the commands name. whole: of all
        of the working folder.
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
        self.unpinned = unpinned  # requirements that give another package another day
        self.notes = notes  # for the user, one line each
        self.unknown = unknown  # the same, where nobody sees what set-up reads
        self.max_age_s = max_age_s  # of a snapshot of this key
        self.targets = targets  # resolved
        self.excluded = excluded  # folders that are no input wherever they lie: the targets, the store
        self.editables = editables  # folders that commands install in place; every node has to have them there
        self.is_plain = is_plain  # pip alone, and nothing of the user's own that it builds
        self.only_installs = only_installs  # plain, and nothing is made that anybody could read
        self.needs_whole = needs_whole  # programs may read anything, and nobody said what
        self.reads: Reads | None = None  # that the key is made by
        self._document: KeyDocument | None = None

    @cached_property
    def guess_key(self) -> str:
        """Under which lists of reads are kept."""
        return key_of(self.guess)

    @property
    def document(self) -> KeyDocument:
        """With what set-up reads; as long as that is not known, what its commands name."""
        if self._document is None:
            self._document = self._with_guess(is_whole=False, is_first=True)
        return self._document

    @cached_property
    def key(self) -> str:
        return key_of(self.document)

    def aged(self, unpinned: list[str], max_age_s: float) -> Keyed:
        """The same, of which is known by now that it is not pinned."""
        assert self.reads is not None, "set-up has run"
        made = self._with(self.reads, self.document)
        made.unpinned, made.max_age_s = unpinned, max_age_s
        return made

    def look(self, environ: Mapping[str, str], say: Callable[[str], object] = lambda _: None) -> Now:
        """A look at what there is on this node of what set-up reads."""
        return Now(self._cwd, environ, self.excluded, say)

    def with_reads(self, reads: Reads, now: Now) -> Keyed:
        """By what a set-up has read, as this node has it. Raises: KeyUnknown, where there is too much of it."""
        if reads.how == GUESSED:
            return self._with(reads, self._with_guess(is_whole=reads.is_whole))
        return self.with_states(reads, states_for_key(reads, now.states(reads)))

    def with_states(self, reads: Reads, states: Mapping[str, str]) -> Keyed:
        """The same of what is known already, by label."""
        cwd = plain(os.path.realpath(self._cwd)) if reads.is_placed else self.guess.cwd
        document = msgspec.structs.replace(
            self.guess, seen=reads.how, reads=few(states), cwd=cwd, guess=self.guess_key
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
        """Args: is_first: set-up has not run yet, and what it reads need not be what its commands name."""
        digests = {}
        for name, digest in self._guessed.items():
            try:
                digests[name] = digest()
            except KeyUnknown:
                if not is_first:
                    raise
                digests[name] = _TOO_MUCH
        if is_whole:
            digests[WHOLE] = self._whole()
        inputs = dict(sorted((self.guess.inputs | digests).items()))
        guess = "" if is_first else self.guess_key
        return msgspec.structs.replace(self.guess, inputs=inputs, seen=GUESSED, guess=guess)

    def remember(self) -> None:
        """Reads what commands name, and the working folder if that may count: set-up may change both."""
        for digest in (*self._guessed.values(), *([self._whole] if self.needs_whole else [])):
            try:
                digest()
            except KeyUnknown:
                continue

    @property
    def guessed_names(self) -> list[str]:
        """What the commands name."""
        return list(self._guessed)


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
        inputs=inputs.declared,
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
    return Keyed(
        document,
        inputs.guessed,
        inputs.whole,
        cwd=spec.cwd,
        unpinned=unpinned,
        notes=notes,
        unknown=[redact_text(plain(note), secrets) for note in inputs.unknown],
        max_age_s=age_s,
        targets=targets,
        excluded=excluded,
        editables=inputs.editables,
        is_plain=inputs.is_plain,
        only_installs=inputs.only_installs,
        needs_whole=not inputs.is_known and not spec.inputs,
    )


def unpinned_line(unpinned: Sequence[str], max_age_s: float | None) -> str:
    """PURE: a warning."""
    shown = ", ".join(unpinned[:MOST_UNPINNED_TOLD])
    more = len(unpinned) - MOST_UNPINNED_TOLD
    others = f" and {more} more" if more > 0 else ""
    age = "" if max_age_s is None else f", so what is kept is used for {counted(max_age_s / 86400, 'day')}"
    return f"warning: set-up is not pinned ({shown}{others}): another day it may give another environment{age}"


def _once(digest: Callable[[], str]) -> Callable[[], str]:
    """The same at each call, also the error."""
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
