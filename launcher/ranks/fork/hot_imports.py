"""Records of the modules that a job imported up to its first step, for the next start of the same job.

One small text file for each job below the user's cache directory. It names modules that a later start imports, so
it is trusted only if no other user could have written it, and each name is checked. Nothing here fails a job: an
unreadable file counts as no record, and the reason of a failed write is returned in words.
"""

from __future__ import annotations

import time

from bootseer.light_typing import TYPE_CHECKING, Mapping, NamedTuple, Sequence
from launcher.ranks.fork import policy
from launcher.ranks.fork.policy import MAX_MODULES, is_module_name
from launcher.ranks.start_trace import files as record_files
from launcher.ranks.start_trace.files import JobKey, make_key

if TYPE_CHECKING:
    from launcher.ranks.fork.import_plan import ImportPlan

__all__ = [
    "ImportRecord",
    "JobImports",
    "JobKey",
    "cache_dir",
    "make_key",
    "read_listing",
    "read_record",
    "write_record",
]

_FIRST_LINE = "bootseer imports 2"
_LAST_LINE = "end"  # a file without it is truncated
_SUFFIX = ".imports"
_MAX_BYTES = 1 << 20
_MAX_WHY_CHARS = 300
_MAX_DROPPED = 500
_MAX_CHANGES = 500
_MAX_PATH_CHARS = 4096
_MAX_RECORDS = 256  # scripts in a new directory for each run would fill the cache
_DAY_S = 86_400
_RECORD_AGE_S = 30 * _DAY_S
_DROPPED_AGE_S = 7 * _DAY_S  # then it is retried: the library may have been fixed
# Consecutive failures after which only the last complete set is preloaded.
_ONLY_PROVEN_AFTER = 2


class ImportRecord(NamedTuple):
    """The results of an earlier start of the job."""

    modules: tuple[str, ...]
    dropped: dict[str, str]  # modules whose preloading failed: name -> why
    caches_directory: str = ""  # of its compile caches
    left_out: Mapping[str, str] = {}  # noqa: RUF012 # modules that each rank imports itself: name -> why; "": imports such a one
    changes: tuple[str, ...] = ()  # changes by the script that affect no preloaded module
    is_whole: bool = False  # one of these names every import of the last start
    proven: tuple[str, ...] = ()  # the complete last set of preloaded modules
    failures: int = 0  # consecutive failures of preloading since then
    last_failure: str = ""


def cache_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of the records, which need not exist; "" if it is unknown."""
    return record_files.records_dir(environ, "imports")


# ---- reading -------------------------------------------------------------------------------------------------


def read_record(directory: str, key: JobKey) -> ImportRecord | None:
    """Return the record of this job; None if there is none to use."""
    found = _read(directory, key)
    if found is None:
        return None
    return found.record


class _Found(NamedTuple):
    """The content of a file."""

    record: ImportRecord
    dropped_s: dict[str, int]  # the time at which modules failed


def _read(directory: str, key: JobKey) -> _Found | None:
    if not directory:
        return None
    try:
        text = record_files.read(directory, _file_name(key), _MAX_BYTES, _RECORD_AGE_S)
    except (OSError, ValueError):
        return None
    return _parse(text, key)


def _parse(text: str, key: JobKey) -> _Found | None:
    lines = text.split("\n")
    header = _header(key)
    if lines[: len(header)] != header or lines[-2:] != [_LAST_LINE, ""]:
        return None
    now = int(time.time())
    modules: dict[str, None] = {}
    proven: dict[str, None] = {}
    left_out: dict[str, str] = {}
    dropped: dict[str, str] = {}
    dropped_s: dict[str, int] = {}
    changes: list[str] = []
    caches_directory, is_whole, failures, last_failure = "", False, 0, ""
    for line in lines[len(header) : -2]:
        kind, _, rest = line.partition(" ")
        name, _, more = rest.partition(" ")
        when, _, why = more.partition(" ")
        is_time = when.isascii() and when.isdigit() and len(when) < 16
        if kind == "caches" and rest.startswith("/"):
            caches_directory = rest
        elif kind == "change":
            changes.append(rest)
        elif kind == "whole" and not rest:
            is_whole = True
        elif kind == "failed" and name.isascii() and name.isdigit() and len(name) < 4 and is_time:
            if -_DAY_S < now - int(when) < _DROPPED_AGE_S:
                failures, last_failure = int(name), _plain(why)
        elif kind == "proven" and rest == "*":
            proven.update(modules)
        elif not is_module_name(name):
            return None
        elif kind == "module" and not more:
            modules[name] = None
        elif kind == "proven" and not more:
            proven[name] = None
        elif kind == "left":
            left_out[name] = _plain(more)
        elif kind == "dropped" and is_time:
            if -_DAY_S < now - int(when) < _DROPPED_AGE_S:
                dropped[name], dropped_s[name] = _plain(why), int(when)
        else:
            return None
    return _Found(
        ImportRecord(
            tuple(modules)[:MAX_MODULES],
            dropped,
            caches_directory,
            left_out,
            tuple(changes),
            is_whole,
            tuple(proven)[:MAX_MODULES],
            failures,
            last_failure,
        ),
        dropped_s,
    )


def read_listing(path: str) -> list[tuple[str, str]]:
    """Return the modules of a rank at its first step: name and file; empty if there is no list."""
    try:
        lines = record_files.read_listing(path, record_files.MAX_LISTING_BYTES)
    except (OSError, ValueError):
        return []
    # Lines of another form name other files that the rank needed (observe.py).
    return [(words[0], words[1]) for line in lines if len(words := line.split("\t")) == 2]


def read_line(path: str) -> str:
    """Return a line that a process of the job has written; "" for none."""
    try:
        lines = record_files.read_listing(path, _MAX_PATH_CHARS)
    except (OSError, ValueError):
        return ""
    return _plain(lines[0]) if lines else ""


# ---- writing -------------------------------------------------------------------------------------------------


def write_record(directory: str, key: JobKey, record: ImportRecord) -> str:
    """Write a record, replacing an earlier one; return why that failed, "" if it did not."""
    try:
        data = _format(directory, key, record)
    except ValueError as error:  # a name that is not text
        return str(error)
    return record_files.write(directory, _file_name(key), data, _SUFFIX, _MAX_RECORDS)


def _format(directory: str, key: JobKey, record: ImportRecord) -> bytes:
    now = int(time.time())
    earlier = _read(directory, key)
    known = {} if earlier is None else earlier.dropped_s
    lines = _header(key)
    folder = record.caches_directory
    if folder.startswith("/") and "\n" not in folder and len(folder) < _MAX_PATH_CHARS:
        lines.append(f"caches {folder}")
    for name, why in list(record.dropped.items())[:_MAX_DROPPED]:
        if is_module_name(name):  # keeps the time of its first failure, or it would never be retried
            lines.append(f"dropped {name} {known.get(name, now)} {_plain(why)}")
    if record.failures:
        lines.append(f"failed {min(record.failures, 999)} {now} {_plain(record.last_failure)}")
    lines += [f"change {what}" for what in record.changes[:_MAX_CHANGES] if _plain(what) == what]
    if record.is_whole:
        lines.append("whole")
    size = sum(len(line) for line in lines) * 4
    named = [("module", name, "") for name in record.modules[:MAX_MODULES]]
    if record.proven != record.modules:
        named += [("proven", name, "") for name in record.proven[:MAX_MODULES]]
    named += [("left", name, f" {_plain(why)}") for name, why in list(record.left_out.items())[:MAX_MODULES]]
    for kind, name, more in named:
        line = f"{kind} {name}{more}".rstrip()
        size += len(line.encode("utf-8", "replace")) + 1
        if is_module_name(name) and size < _MAX_BYTES:
            lines.append(line)
    if record.proven and record.proven == record.modules:
        lines.append("proven *")
    return "\n".join([*lines, _LAST_LINE, ""]).encode("utf-8", "surrogateescape")


def _header(key: JobKey) -> list[str]:
    return record_files.header(_FIRST_LINE, key)


def _plain(text: str) -> str:
    """Return printable text, as one line."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_WHY_CHARS]).strip()


def _file_name(key: JobKey) -> str:
    return record_files.file_name(key, _SUFFIX)


# ---- of one job ----------------------------------------------------------------------------------------------


class JobImports:
    """What is known of the imports of a job's ranks: by its record, by other nodes, and by this start."""

    def __init__(self, given: tuple[str, ...], default: tuple[str, ...]) -> None:
        """Args: given: modules that the user names; default: those of the framework."""
        self._given = given
        self._default = default
        self._key: JobKey | None = None
        self._directory = ""
        self._stored: tuple[str, ...] = ()  # hot imports, from other nodes
        self.record = ImportRecord((), {})

    @property
    def is_read(self) -> bool:
        """Whether `read` was called."""
        return self._key is not None

    @property
    def can_be_kept(self) -> bool:
        """Whether the next start of the job may find them."""
        return self._directory != ""

    def add_stored(self, stored: Sequence[str]) -> None:
        """Add imports of this job's ranks elsewhere. The record has priority."""
        self._stored = policy.filter_stored(stored)

    def read(self, environ: Mapping[str, str], python: str, mode: str, target: str) -> str:
        """Read the record of a job; return its reason against a fork, as `find_trouble` does."""
        self._key = make_key(python, mode, target)
        self._directory = cache_dir(environ)
        found, trouble = read_record(self._directory, self._key), ""
        if found is not None:
            # Modules that the user names are retried: they may have been fixed, else a line reports the error.
            dropped = {name: why for name, why in found.dropped.items() if name not in self._given}
            trouble = policy.find_trouble(found.left_out)
            is_whole = found.is_whole and not trouble  # it may be fixed without a change of the script
            self.record = found._replace(dropped=dropped, is_whole=is_whole)
        if not self.record.modules:
            self.record = self.record._replace(modules=self._stored)
        return trouble

    def choose(self) -> tuple[str, ...]:
        """Return the modules to preload, in this order."""
        record = self.record
        known = record.modules
        if record.failures >= _ONLY_PROVEN_AFTER and record.proven:
            known = record.proven
        # Those that the user names are tried in any case, until they fail.
        left_out = {name: why for name, why in record.left_out.items() if name not in self._given}
        return policy.choose_modules(self._given, self._default, known, {**left_out, **record.dropped})

    def without_given(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return those of the modules that the user does not name."""
        return tuple(name for name in modules if name not in self._given)

    def set_caches_directory(self, directory: str) -> None:
        """Note where compile caches are, for the next start; "" for nowhere."""
        self.record = self.record._replace(caches_directory=directory)

    def add_failure(self, names: Sequence[str], why: str, text: str, loading: Sequence[str]) -> None:
        """Drop modules whose preloading failed: the first of `names`, and those of the others that import it.

        Args: text: the reason for users; loading: the modules that were to be imported.
        """
        record, first = self.record, names[0]
        if not any(policy.has_within(name, self._given) for name in names):  # else it is retried
            record = record._replace(failures=record.failures + 1, last_failure=text)
        failed = [name for name in names if policy.has_within(name, loading)]
        reasons = {name: why if name == first else f"imports {first}, which {why}" for name in failed}
        self.record = record._replace(dropped={**record.dropped, **reasons})
        self.save()

    def add_proven(self, modules: Sequence[str]) -> None:
        """Note a complete set of preloaded modules."""
        record, proven = self.record, self.without_given(modules)
        if record.failures or (proven != record.proven and record.modules):
            self.record = record._replace(proven=proven, failures=0)
            self.save()

    def add_plan(self, plan: ImportPlan, before: Sequence[str]) -> None:
        """Add the imports of this start. Args: before: modules that the rank was forked with."""
        record = self.record
        known = tuple(dict.fromkeys((*before, *plan.modules)))
        left_out = {**(record.left_out if before else {}), **plan.left_out}
        changes = (*record.changes, *plan.changes) if before else plan.changes
        self.record = record._replace(
            modules=known,
            left_out={name: why for name, why in left_out.items() if name not in known},
            changes=tuple(dict.fromkeys(changes)),
            is_whole=True,
        )
        self.save()

    def forget_whole(self) -> None:
        """Have the next start record all imports again."""
        self.record = self.record._replace(is_whole=False)

    def save(self) -> None:
        """Write the record. If that fails, the next start only loses its early preload."""
        if self._key is not None:
            write_record(self._directory, self._key, self.record)
