"""Decide whether set-up is watched, and make the key from what it has read.

In: the key of the first guess, the spec, the watcher's report. Out: rules for the watcher (setup_watch.py); the
key of the result, or the reason for having none. If set-up cannot be watched, the key covers the files that its
commands name. If those include unknown programs, the key covers all of the working directory.
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

from bootseer.env.capture.outside import cache_directories
from bootseer.env.key.document import ABSENT
from bootseer.env.key.keying import UNPINNED_AGE_S, Keyed, unpinned_line
from bootseer.env.key.targets import local_store
from bootseer.env.parse.installed import find_installed
from bootseer.env.parse.pins import find_unpinned
from bootseer.env.reads import local_builds
from bootseer.env.reads.make_list import make_reads, seen_of, why_unseen
from bootseer.env.reads.read_list import GUESSED, OBSERVED, Reads
from bootseer.env.reads.watch_calls import MACHINES
from bootseer.env.spec import SetupSpec
from bootseer.errors import KeyUnknown
from bootseer.linux.syscalls import libc

VARIABLE = "BOOTSEER_WATCH_SETUP"  # "off": set-up is not watched
_REALTIME_COARSE = 5  # the clock of file timestamps; the time module has no name for it
_GET_ACTION_AVAIL, _USER_NOTIF = 2, 0x7FC00000
_SUDO = ("sudo", "doas", "pkexec")
_ASKS_FOR_MORE = re.compile(r"\b(sudo|doas|pkexec|su|apptainer|singularity)\b")
_MAX_SCRIPT_BYTES = 1 << 20
_MAX_SCRIPTS = 256  # maximum scripts to follow
_BETWEEN_WORDS = re.compile(r"[\s;&|()<>\"'`${}=,]+")
_MAKES = re.compile(r"\b(g?make|just)\b|\$\(MAKE\)")
_MAKEFILES = ("Makefile", "makefile", "GNUmakefile", "justfile")
_SCRIPTS = {"", ".sh", ".bash", ".zsh", ".mk", ".py", ".env"}
_MAX_TEXT_BYTES = 8 << 20
_NO_TEXT = (".whl", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".conda", ".egg", ".so")
# For an environment that contains the working directory: the other files belong to the user.
_OF_ENVIRONMENTS = ("bin", "lib", "lib64", "include", "share", "etc", "conda-meta", "man", "sbin", "ssl", "pkgs")
# Files that installers read although no command names them.
_EXPECTED = re.compile(
    r"(^|/)(pyproject\.toml|setup\.cfg|poetry\.toml|pdm\.toml|\.python-versions?|\.env|\.netrc)$"
    r"|\.(whl|zip|tar\.gz|tgz|tar\.bz2|tar\.xz|conda|egg|html|txt|in|lock)$"
)


class WatchPlan(NamedTuple):
    """How to run set-up."""

    watch: dict[str, Any] | None  # for run_setup; None: set-up is not watched
    why_not: str  # why set-up is not watched
    notes: list[str]  # for the user
    began_ns: int  # by the clock of file timestamps
    settings: Mapping[str, list[int] | None] = MappingProxyType(
        {}
    )  # state of the settings files that only pip itself may look up


class SetupKey(NamedTuple):
    """The key of a finished set-up."""

    keyed: Keyed  # the key of the result
    why_not: str  # why the result cannot be stored; "" if it can
    notes: list[str]  # for the user

    @property
    def is_watched(self) -> bool:
        """Whether the key is made from watched reads."""
        return self.keyed.reads is not None and self.keyed.reads.how == OBSERVED


def plan(keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], own: Iterable[str] = ()) -> WatchPlan:
    """Plan watching before set-up. Args: environ: of the commands. own: Bootseer's files that change meanwhile."""
    why_not = _why_not(spec, environ)
    notes = local_builds.drop_cached_builds(environ, keyed.targets)
    began_ns = time.clock_gettime_ns(_REALTIME_COARSE)
    if why_not:
        keyed.hash_guess()
        return WatchPlan(None, why_not, notes, began_ns)
    cwd = os.path.realpath(spec.cwd)
    roots = [cwd, *(os.path.realpath(each) for each in keyed.editables)]
    never = [*cache_directories(environ), local_store(spec.store)]
    scratch = {"/tmp", "/var/tmp", os.path.normpath(environ.get("TMPDIR") or "/tmp")}  # noqa: S108
    never = [each for each in never if each and each not in scratch]
    for target in keyed.targets:
        if cwd == target or cwd.startswith(target + "/"):
            never += (os.path.join(target, name) for name in _OF_ENVIRONMENTS)
        else:
            never.append(target)
    home = environ.get("HOME", "")
    literal = os.path.normpath(spec.cwd)
    return WatchPlan(
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
    """Return the states of all places where pip looks up its settings; none in an image, which has its own."""
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
    keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], planned: WatchPlan, report: Mapping[str, Any] | None
) -> SetupKey:
    """Make the key after set-up has succeeded. Args: environ: of the job."""
    if report is not None and "touched" in report:
        looked = {
            path: {"ops": "r", "was": was, "digest": "", "names": None, "links": ""}
            for path, was in planned.settings.items()
        }
        report = {**report, "touched": looked | report["touched"]}
    touched = (report or {}).get("touched", {})
    read = [path for path, each in touched.items() if "r" in each["ops"]]
    if stale := local_builds.find_stale_package(keyed.targets, read, touched, planned.began_ns):
        return SetupKey(keyed, stale, [])
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
                return SetupKey(keyed, f"{seen.changed} changed while set-up ran", [])
            elif (
                planned.watch is not None
                and not planned.watch["looks"]
                and (name := _unexpected_file(keyed, seen.states))
            ):
                why, is_whole = f"it read {name}, which no command names", True
            else:
                reads = seen.reads
                if keyed.editables:
                    reads = msgspec.structs.replace(reads, is_placed=True)
                made = keyed.with_states(reads, seen.states)
                return _with_age(SetupKey(made, "", []), spec, planned, _texts(spec, environ, report))
        reads = Reads(guess=keyed.guess_key, how=GUESSED, is_whole=is_whole)
        made = keyed.with_reads(reads, now)
    except KeyUnknown as error:
        return SetupKey(keyed, str(error), [])
    made_of = _with_age(SetupKey(made, "", []), spec, planned, _texts(spec, environ, report))
    what = "all of the working directory" if is_whole else "the files that its commands name"
    return made_of._replace(
        notes=[*made_of.notes, *keyed.unknown, f"files read by set-up are unknown ({why}): the key covers {what}"]
    )


def _with_age(decided: SetupKey, spec: SetupSpec, planned: WatchPlan, texts: list[str]) -> SetupKey:
    """Let the result expire if its packages are not pinned, which is known only after installation."""
    keyed = decided.keyed
    unpinned = find_unpinned(find_installed(keyed.targets, planned.began_ns), texts)
    if not unpinned or keyed.unpinned:
        return decided  # the user was warned about names in commands before
    keyed = keyed.aged(unpinned, UNPINNED_AGE_S if spec.max_age_s is None else spec.max_age_s)
    return decided._replace(keyed=keyed, notes=[*decided.notes, unpinned_line(keyed.unpinned, keyed.max_age_s)])


def _texts(spec: SetupSpec, environ: Mapping[str, str], report: Mapping[str, Any] | None) -> list[str]:
    """Return all texts that select packages: commands, variables of installers, files that were read."""
    texts = [*spec.commands, *(value for name, value in environ.items() if _names_files(name))]
    made = set((report or {}).get("made", ()))
    for path, each in (report or {}).get("touched", {}).items():
        if "r" in each["ops"] and each["was"] is not None and path not in made and not path.endswith(_NO_TEXT):
            try:
                with open(path, "rb") as file:
                    texts.append(file.read(_MAX_TEXT_BYTES).decode(errors="replace"))
            except OSError:
                continue
    return texts


def _names_files(variable: str) -> bool:
    return variable.startswith(("PIP_", "UV_", "CONDA_", "POETRY_", "PDM_"))


def _unexpected_file(keyed: Keyed, states: Mapping[str, str]) -> str:
    """Return a file of the user that an installer would not read; others may be unseen."""
    known = {name.removesuffix(" (archives)") for name in keyed.guessed_names} | keyed.guess.inputs.keys()
    for name, state in states.items():
        is_file = state != ABSENT and not name.endswith(")") and not name.startswith(("/", "~/"))
        if is_file and name not in known and not _EXPECTED.search(name):
            return name
    return ""


def _why_not(spec: SetupSpec, environ: Mapping[str, str]) -> str:
    """Return why set-up cannot be watched here; "" if it can."""
    if environ.get(VARIABLE, "").lower() in ("off", "0", "no", "false"):
        return f"{VARIABLE} is set to off"
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"watching is not supported on {platform.machine()}"
    action = ctypes.c_uint32(_USER_NOTIF)
    if libc().syscall(machine.seccomp, _GET_ACTION_AVAIL, 0, ctypes.byref(action)):
        return f"this kernel or container does not allow watching: {os.strerror(ctypes.get_errno())}"
    # Without root, a process can be watched only if no program gains privileges.
    if (
        os.geteuid()
        and any(shutil.which(each, path=environ.get("PATH")) for each in _SUDO)
        and may_ask(spec.commands, spec.cwd)
    ):
        return "a command may use sudo or a similar program, which cannot work while set-up is watched"
    return ""


def may_ask(commands: Iterable[str], cwd: str) -> bool:
    """Return whether a command, or a script that it runs at any depth, names a program that gives privileges."""
    todo = [(command, cwd, True) for command in commands]
    seen: set[str] = set()
    while todo:
        text, directory, is_command = todo.pop()
        if _ASKS_FOR_MORE.search(text):
            return True
        words = {word.lstrip("/") for word in _BETWEEN_WORDS.split(text)} - {""}
        paths = {os.path.join(above, word) for above in (cwd, directory) for word in words}
        if _MAKES.search(text):
            directories = {directory, *filter(os.path.isdir, paths)}
            paths |= {os.path.join(each, name) for each in directories for name in _MAKEFILES}
        if is_command:
            paths |= {word for word in _BETWEEN_WORDS.split(text) if word.startswith("/")}
        for path in paths - seen:
            if len(seen) < _MAX_SCRIPTS and (script := _script(path, is_command)):
                seen.add(path)
                todo.append((script, os.path.dirname(path), False))
    return False


def _script(path: str, is_named: bool) -> str:
    """Return the text of a script; "" for any other file. Args: is_named: a command names the file."""
    try:
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            data = file.read(_MAX_SCRIPT_BYTES)
    except (OSError, ValueError):
        return ""
    is_script = is_named or data.startswith(b"#!") or os.path.splitext(path)[1] in _SCRIPTS
    return data.decode(errors="replace") if is_script and b"\0" not in data else ""
