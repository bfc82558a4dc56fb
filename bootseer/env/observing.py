"""Whether and how set-up is watched, and which key comes of what it has read.

In: the key without that, the spec, the watcher's report. Out: rules for the watcher (setup_watch.py); the key of
what set-up has made, or why it has none. Where set-up cannot be watched, the key has what its commands name; and
all of the working folder, if they are programs of which nothing is known.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from bootseer.env import local_builds
from bootseer.env.document import ABSENT
from bootseer.env.installed import find_installed
from bootseer.env.keying import UNPINNED_AGE_S, Keyed, unpinned_line
from bootseer.env.outside import cache_folders
from bootseer.env.pins import find_unpinned
from bootseer.env.reads import GUESSED, OBSERVED, Reads
from bootseer.env.reads_make import make_reads, seen_of, why_unseen
from bootseer.env.spec import SetupSpec
from bootseer.env.targets import local_store
from bootseer.env.watch_calls import MACHINES
from bootseer.errors import KeyUnknown

VARIABLE = "BOOTSEER_WATCH_SETUP"  # "off": set-up is not watched
_REALTIME_COARSE = 5  # that files are stamped by; the time module does not name it
_GET_ACTION_AVAIL, _USER_NOTIF = 2, 0x7FC00000
_SUDO = ("sudo", "doas", "pkexec")
_ASKS_FOR_MORE = re.compile(r"\b(sudo|doas|pkexec|su|apptainer|singularity)\b")
_MOST_SCRIPT_BYTES = 1 << 20
_MOST_SCRIPTS = 256  # that are followed
_BETWEEN_WORDS = re.compile(r"[\s;&|()<>\"'`${}=,]+")
_MAKES = re.compile(r"\b(g?make|just)\b|\$\(MAKE\)")
_MAKEFILES = ("Makefile", "makefile", "GNUmakefile", "justfile")
_SCRIPTS = {"", ".sh", ".bash", ".zsh", ".mk", ".py", ".env"}
_MOST_TEXT_BYTES = 8 << 20
_NO_TEXT = (".whl", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".conda", ".egg", ".so")
# Of an environment that contains the working folder: the rest of it is the user's.
_OF_ENVIRONMENTS = ("bin", "lib", "lib64", "include", "share", "etc", "conda-meta", "man", "sbin", "ssl", "pkgs")
# What installers read by themselves, besides what commands name.
_EXPECTED = re.compile(
    r"(^|/)(pyproject\.toml|setup\.cfg|poetry\.toml|pdm\.toml|\.python-versions?|\.env|\.netrc)$"
    r"|\.(whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz|conda|egg|html|txt|in|lock)$"
)


class Plan(NamedTuple):
    """How set-up is to be run."""

    watch: dict[str, Any] | None  # for run_setup; None: it is not watched
    why_not: str  # in that case
    notes: list[str]  # for the user
    began_ns: int  # by the clock of files
    settings: Mapping[str, list[int] | None] = MappingProxyType(
        {}
    )  # what there is of those that pip alone may only look for


class Decided(NamedTuple):
    """What came of it."""

    keyed: Keyed  # the key of what set-up has made
    why_not: str  # why that cannot be kept; "" if it can
    notes: list[str]  # for the user

    @property
    def is_watched(self) -> bool:
        """Whether the key is made by what set-up has read."""
        return self.keyed.reads is not None and self.keyed.reads.how == OBSERVED


def plan(keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], own: Iterable[str] = ()) -> Plan:
    """Before set-up. Args: environ: of its commands. own: files of ours that change meanwhile."""
    why_not = _why_not(spec, environ)
    notes = local_builds.refresh(environ, keyed.targets)
    began_ns = time.clock_gettime_ns(_REALTIME_COARSE)
    if why_not:
        keyed.remember()
        return Plan(None, why_not, notes, began_ns)
    cwd = os.path.realpath(spec.cwd)
    roots = [cwd, *(os.path.realpath(each) for each in keyed.editables)]
    never = [*cache_folders(environ), local_store(spec.store)]
    scratch = {"/tmp", "/var/tmp", os.path.normpath(environ.get("TMPDIR") or "/tmp")}  # noqa: S108
    never = [each for each in never if each and each not in scratch]
    for target in keyed.targets:
        if cwd == target or cwd.startswith(target + "/"):
            never += (os.path.join(target, name) for name in _OF_ENVIRONMENTS)
        else:
            never.append(target)
    home = environ.get("HOME", "")
    literal = os.path.normpath(spec.cwd)
    return Plan(
        {
            "looks": not keyed.is_plain,
            "makes": not keyed.only_installs,
            "began_ns": began_ns,
            "roots": list(dict.fromkeys(each for each in roots if each != "/")),
            "literal": [] if literal == cwd else [[literal, cwd]],
            "never": sorted({*never, *map(os.path.realpath, never)}),
            "files": sorted({*own, *map(os.path.realpath, own)}),
            "home": os.path.realpath(home) if home.startswith("/") else "",
            "temporary": [f"{each}/" for each in sorted(scratch | set(map(os.path.realpath, scratch)))],
            "targets": keyed.targets,
            "programs": [os.path.normpath(each) for each in environ.get("PATH", "").split(":") if each[:1] == "/"],
            "only_roots": spec.in_image,
        },
        "",
        notes,
        began_ns,
        _settings_of_pip(spec, environ, keyed.targets) if keyed.is_plain else {},
    )


def _settings_of_pip(
    spec: SetupSpec, environ: Mapping[str, str], targets: Iterable[str]
) -> dict[str, list[int] | None]:
    """What there is at all places where pip looks for its settings. In an image they are the image's."""
    if spec.in_image:
        return {}
    home = environ.get("HOME", "")
    above = [*(environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"), environ.get("XDG_CONFIG_HOME", "")]
    places = ["/etc/pip.conf", *(os.path.join(each, "pip", "pip.conf") for each in above if each.startswith("/"))]
    if home.startswith("/"):
        places += (os.path.join(home, name) for name in (".pip/pip.conf", ".config/pip/pip.conf"))
    places += (os.path.join(target, "pip.conf") for target in targets)
    if environ.get("PIP_CONFIG_FILE", os.devnull) != os.devnull:
        places.append(os.path.join(os.path.realpath(spec.cwd), environ["PIP_CONFIG_FILE"]))
    return {os.path.normpath(path): seen_of(path) for path in places}


def decide(
    keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], planned: Plan, report: Mapping[str, Any] | None
) -> Decided:
    """After set-up has succeeded. Args: environ: of the job."""
    if report is not None and "touched" in report:
        looked = {
            path: {"ops": "r", "was": was, "digest": "", "names": None, "links": ""}
            for path, was in planned.settings.items()
        }
        report = {**report, "touched": looked | report["touched"]}
    touched = (report or {}).get("touched", {})
    read = [path for path, each in touched.items() if "r" in each["ops"]]
    if stale := local_builds.find_stale(keyed.targets, read, touched, planned.began_ns):
        return Decided(keyed, stale, [])
    why = planned.why_not or why_unseen(report)
    is_whole = keyed.needs_whole
    now = keyed.look(environ)
    try:
        if not why and report is not None:
            named = [*spec.commands, *(value for name, value in environ.items() if _names_files(name))]
            seen = make_reads(report, keyed.guess_key, now, named, keyed.guess.inputs)
            if isinstance(seen, str):
                why = seen
            elif seen.changed:
                return Decided(keyed, f"{seen.changed} changed while set-up ran", [])
            elif (
                planned.watch is not None
                and not planned.watch["looks"]
                and (name := _surprise(keyed, seen.states))
            ):
                why, is_whole = f"it read {name}, which no command names", True
            else:
                reads = seen.reads
                if keyed.editables:
                    reads = msgspec.structs.replace(reads, is_placed=True)
                made = keyed.with_states(reads, seen.states)
                return _with_age(Decided(made, "", []), spec, planned, _texts(spec, environ, report))
        reads = Reads(guess=keyed.guess_key, how=GUESSED, is_whole=is_whole)
        made = keyed.with_reads(reads, now)
    except KeyUnknown as error:
        return Decided(keyed, str(error), [])
    made_of = _with_age(Decided(made, "", []), spec, planned, _texts(spec, environ, report))
    what = "all of the working folder counts" if is_whole else "what its commands name counts"
    return made_of._replace(
        notes=[*made_of.notes, *keyed.unknown, f"what set-up read is not known ({why}): {what}"]
    )


def _with_age(decided: Decided, spec: SetupSpec, planned: Plan, texts: list[str]) -> Decided:
    """What another day would be another package is known when it is installed: then what was made expires."""
    keyed = decided.keyed
    unpinned = find_unpinned(find_installed(keyed.targets, planned.began_ns), texts)
    if not unpinned or keyed.unpinned:
        return decided  # of what its commands name it was told before
    keyed = keyed.aged(unpinned, UNPINNED_AGE_S if spec.max_age_s is None else spec.max_age_s)
    return decided._replace(keyed=keyed, notes=[*decided.notes, unpinned_line(keyed.unpinned, keyed.max_age_s)])


def _texts(spec: SetupSpec, environ: Mapping[str, str], report: Mapping[str, Any] | None) -> list[str]:
    """All that says which packages are wanted: commands, variables of installers, files that were read."""
    texts = [*spec.commands, *(value for name, value in environ.items() if _names_files(name))]
    made = set((report or {}).get("made", ()))
    for path, each in (report or {}).get("touched", {}).items():
        if "r" in each["ops"] and each["was"] is not None and path not in made and not path.endswith(_NO_TEXT):
            try:
                with open(path, "rb") as file:
                    texts.append(file.read(_MOST_TEXT_BYTES).decode(errors="replace"))
            except OSError:
                continue
    return texts


def _names_files(variable: str) -> bool:
    return variable.startswith(("PIP_", "UV_", "CONDA_", "POETRY_", "PDM_"))


def _surprise(keyed: Keyed, states: Mapping[str, str]) -> str:
    """A file of the user's that an installer would not read: it, too, may have looked for what nobody has seen."""
    known = {name.removesuffix(" (archives)") for name in keyed.guessed_names} | keyed.guess.inputs.keys()
    for name, state in states.items():
        is_file = state != ABSENT and not name.endswith(")") and not name.startswith(("/", "~/"))
        if is_file and name not in known and not _EXPECTED.search(name):
            return name
    return ""


def _why_not(spec: SetupSpec, environ: Mapping[str, str]) -> str:
    """Why set-up cannot be watched here; "" if it can."""
    if environ.get(VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return f"{VARIABLE} turns that off"
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"it cannot be watched on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    action = ctypes.c_uint32(_USER_NOTIF)
    if libc.syscall(machine.seccomp, _GET_ACTION_AVAIL, 0, ctypes.byref(action)):
        return f"this kernel, or this container, does not allow it: {os.strerror(ctypes.get_errno())}"
    # Who is not root can be watched only if no program gains privileges.
    if (
        os.geteuid()
        and any(shutil.which(each, path=environ.get("PATH")) for each in _SUDO)
        and may_ask(spec.commands, spec.cwd)
    ):
        return "a command may ask for more privileges, which it could not get while it is watched"
    return ""


def may_ask(commands: Iterable[str], cwd: str) -> bool:
    """Whether a command, or a script that it runs, also by others, names a program that gives privileges."""
    todo = [(command, cwd, True) for command in commands]
    seen: set[str] = set()
    while todo:
        text, folder, is_command = todo.pop()
        if _ASKS_FOR_MORE.search(text):
            return True
        words = {word.lstrip("/") for word in _BETWEEN_WORDS.split(text)} - {""}
        paths = {os.path.join(above, word) for above in (cwd, folder) for word in words}
        if _MAKES.search(text):
            folders = {folder, *filter(os.path.isdir, paths)}
            paths |= {os.path.join(each, name) for each in folders for name in _MAKEFILES}
        if is_command:
            paths |= {word for word in _BETWEEN_WORDS.split(text) if word.startswith("/")}
        for path in paths - seen:
            if len(seen) < _MOST_SCRIPTS and (script := _script(path, is_command)):
                seen.add(path)
                todo.append((script, os.path.dirname(path), False))
    return False


def _script(path: str, is_named: bool) -> str:
    """What a script says; "" for anything else. Args: is_named: a command has its name."""
    try:
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            data = file.read(_MOST_SCRIPT_BYTES)
    except (OSError, ValueError):
        return ""
    is_script = is_named or data.startswith(b"#!") or os.path.splitext(path)[1] in _SCRIPTS
    return data.decode(errors="replace") if is_script and b"\0" not in data else ""
