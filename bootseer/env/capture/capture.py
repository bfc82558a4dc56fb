"""Captures the changes of set-up commands to target directories: a walk before, a walk after, a tree of both.

    capture = Capture(targets, environ)
    capture.begin(); ...; capture.end()    # the ranks wait for these two
    capture.build(put)                     # no rank waits for this: at idle priority while they run

The tree contains the state at `end`. A file that changes before it is read ends the capture: nothing is published,
and the job continues.
"""

from __future__ import annotations

import os
import posixpath
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.env.capture import contents, outside
from bootseer.env.capture.compiling import Compiler
from bootseer.env.capture.difference import Difference, compare
from bootseer.env.capture.source import CapturedTarget, EnvSource, open_files
from bootseer.env.capture.walk import Walk, walk
from bootseer.env.exec_place import HERE, ExecPlace
from bootseer.env.scratch import scratch
from bootseer.errors import CaptureRefused, ConfigError, EditableRefused
from bootseer.linux import priority
from bootseer.linux.cgroups import usable_cores
from bootseer.tree.block_codec import Codec
from bootseer.tree.builder.building import BuiltTree, Progress, build
from bootseer.tree.builder.packing import Put

MAX_NAMES = 1000  # in a list of facts
MAX_POINTER_BYTES = 1 << 20
_REALTIME_COARSE = 5  # the clock of file times, which the time module does not name
TICK_S = 0.05  # longer than a step of any kernel's clock


class Changes(NamedTuple):
    """The result of `end`."""

    changed: int  # names that are new or different, directories too
    deleted: int
    outside: list[str]  # paths that were written outside the targets
    took_s: float

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.deleted)


class Facts(NamedTuple):
    """Facts of a captured environment for reports; paths are absolute, with bytes that are not UTF-8 escaped."""

    files: int
    bytes: int
    deleted: int
    compiled: int  # .pyc files that were made for it
    left_out: list[str]  # credentials and the like
    outside: list[str]  # paths that were written outside the targets
    required: list[str]  # declared inputs that a node must have at the same path
    notes: list[str]


class Built(NamedTuple):
    """An environment whose packs have been passed to `put`."""

    tree: BuiltTree
    facts: Facts


class Capture:
    """One capture; see the module's docstring.

    Args:
        targets: absolute directories, none within another; they need not exist before.
        environ: of the set-up commands: locates caches, that of Bootseer too.
        inputs: declared files and directories; packages may be installed in place from them.
        python: the ranks' interpreter, for targets that have none of their own.
        cwd: of the commands. `name`: recorded in the tree's index.
        without: files outside the targets that Bootseer changes itself, such as the log.
        inside: the node or image in which the commands run.
    """

    def __init__(
        self,
        targets: Sequence[str],
        environ: Mapping[str, str],
        *,
        inputs: Sequence[str] = (),
        python: str = "",
        cwd: str = "/",
        name: str = "",
        without: Sequence[str] = (),
        inside: ExecPlace = HERE,
    ) -> None:
        self._targets = [os.path.normpath(target) for target in targets]
        _check_targets(self._targets)
        self._environ = dict(environ)
        self._inputs = list(inputs)
        self._python = python
        self._inside = inside
        self._name = name
        self._caches = outside.cache_directories(environ)
        self._places = outside.places(environ, self._targets, cwd)
        self._not_outside = [*self._caches, *self._targets, *map(os.path.realpath, self._targets), *without]
        self._before: list[Walk] = []
        self._seen_before: outside.DirectorySamples = {}
        self._after: list[Walk] = []
        self._differences: list[Difference] = []
        self._outside: list[str] = []

    def begin(self) -> None:
        """Record the state before the commands. Raises: StorageError; ConfigError."""
        self._before = self._walk()
        self._seen_before = outside.sample(self._places, self._not_outside)

    def end(self) -> Changes:
        """Record the state after the commands. Raises: CaptureRefused; StorageError; ConfigError."""
        started_s = time.monotonic()
        self._after = self._walk()
        for target, after in zip(self._targets, self._after, strict=True):
            if b"" not in after:
                raise CaptureRefused(
                    f"{target}: does not exist after set-up; name the changed directory with --setup-target"
                )
        self._differences = [compare(*each) for each in zip(self._before, self._after, strict=True)]
        self._before = []
        seen = outside.sample(self._places, self._not_outside)
        self._outside = [
            to_utf8_text(path) for path in outside.compare(self._seen_before, seen, self._not_outside)
        ]
        return Changes(
            sum(len(each.changed) for each in self._differences),
            sum(len(each.deleted) for each in self._differences),
            self._outside,
            time.monotonic() - started_s,
        )

    def left(self) -> list[tuple[str, Walk, list[bytes]]]:
        """Return for each target its path, its state at `end`, and the changed and deleted names."""
        return [
            (target, after, [*difference.changed, *difference.deleted])
            for target, after, difference in zip(self._targets, self._after, self._differences, strict=True)
        ]

    def build(
        self,
        put: Put,
        *,
        hot_paths: Sequence[bytes] = (),
        codec: Codec = "zstd",
        threads: int | None = None,
        on_progress: Progress | None = None,
        is_idle: bool = False,
    ) -> Built:
        """Build the tree.

        Args: as `bootseer.tree.builder.building.build`. `on_progress` is called about every second, also without
        progress; an exception that it raises ends the build. `is_idle`: at the lowest priorities of CPU and disk.
        Raises: SourceChanged; EditableRefused, CaptureRefused; StorageError; what `put` raises.
        """
        progress = _Stoppable(on_progress)
        # A separate thread: its priorities cannot be raised again.
        with ThreadPoolExecutor(1, "env-build", priority.lower if is_idle else None) as pool:
            building = pool.submit(self._build, put, hot_paths, codec, threads, progress)
            try:
                return building.result()
            except BaseException:
                progress.is_stopped = True
                raise

    # ---- in parts ------------------------------------------------------------------------------------------

    def _walk(self) -> list[Walk]:
        walks = [walk(target, without=self._below(target)) for target in self._targets]
        newest_ns = max((entry.ctime_ns for each in walks for entry in each.values()), default=0)
        _wait_for_tick(newest_ns)
        return walks

    def _below(self, target: str) -> frozenset[bytes]:
        """Return the caches that lie in a target."""
        prefix = target.rstrip("/") + "/"
        return frozenset(os.fsencode(each[len(prefix) :]) for each in self._caches if each.startswith(prefix))

    def _build(
        self, put: Put, hot_paths: Sequence[bytes], codec: Codec, threads: int | None, on_progress: Progress
    ) -> Built:
        required = self._judge_pointers()
        notes: list[str] = []
        left_out: list[str] = []
        parts = []
        with scratch(self._environ) as directory:
            workers = threads or usable_cores()
            compiler = Compiler(directory, self._python, workers, on_progress, notes, self._inside)
            for target, after, difference in zip(self._targets, self._after, self._differences, strict=True):
                check_links(target, after, difference, self._caches, self._targets)
                gone = find_left_out(target, after, difference)
                left_out += [
                    to_utf8_text(os.path.join(target, os.fsdecode(path)))
                    for path in sorted(gone)
                    if not contents.is_lock(path, after[path])  # no reader needs it
                ]
                made = compiler.compile(target, after, [path for path in difference.changed if path not in gone])
                parts.append(CapturedTarget(target, after, difference, gone, made))
            source = EnvSource(parts, scratch=directory, name=self._name)
            tree = build(source, put, hot_paths=hot_paths, codec=codec, threads=threads, on_progress=on_progress)
        for what, count in tree.statistics.left_out.items():
            notes.append(f"{count} x {what} could not be kept")
        facts = Facts(
            files=tree.statistics.files,
            bytes=tree.statistics.raw_bytes,
            deleted=sum(len(each.deleted) for each in self._differences),
            compiled=sum(len(part.compiled) for part in parts),
            left_out=left_out[:MAX_NAMES],
            outside=self._outside,
            required=required,
            notes=notes,
        )
        return Built(tree, facts)

    def _judge_pointers(self) -> list[str]:
        """Return the inputs from which packages are installed in place. Raises: EditableRefused."""
        pointers: list[contents.EditablePointer] = []
        for target, after, difference in zip(self._targets, self._after, self._differences, strict=True):
            paths = [
                path
                for path in difference.changed
                if contents.metadata_kind(path) and stat.S_ISREG(after[path].mode)
            ]
            for path, data in open_files(target, after, paths, MAX_POINTER_BYTES):
                pointers += contents.find_pointers(path, data)
        resolved = [contents.EditablePointer(each.name, os.path.realpath(each.folder)) for each in pointers]
        targets = [*self._targets, *map(os.path.realpath, self._targets)]
        inputs = {os.path.realpath(each): each for each in self._inputs}
        found = contents.judge_pointers(resolved, targets, inputs)
        if found.refused:
            first = found.refused[0]
            more = len({each.name for each in found.refused}) - 1
            others = f" (so {counted(more, 'more package')})" if more else ""
            raise EditableRefused(
                f"{first.name} is installed in place from {first.folder}{others}, which is in no target, so other "
                f"nodes may not have it; declare it if they do (--setup-input {first.folder}), "
                "or install it without -e"
            )
        return sorted({to_utf8_text(inputs[each]) for each in found.required})


class _Stoppable:
    """The progress callback of a build that ends when its caller is interrupted."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self.is_stopped = False

    def __call__(self, count: int, files: int) -> None:
        if self.is_stopped:
            raise CaptureRefused("the capture was interrupted")
        if self._on_progress is not None:
            self._on_progress(count, files)


def _check_targets(targets: Sequence[str]) -> None:
    """Raise ConfigError for targets that are the same, or within one another."""
    if not targets:
        raise ConfigError("no set-up target; name the directory that set-up commands change with --setup-target")
    resolved = [os.path.realpath(target) for target in targets]
    for one, target in enumerate(resolved):
        for other in range(one):
            if contents.is_within(target, resolved[other]) or contents.is_within(resolved[other], target):
                raise ConfigError(
                    f"{targets[other]} and {targets[one]}: one target lies in the other; name the outer one"
                )


def _wait_for_tick(newest_ns: int) -> None:
    """Wait until later changes get a newer time than all recorded ones.

    The kernel takes file times from a clock that steps every few milliseconds. A second edit in the same step
    would not be detected.
    """
    end_s = time.monotonic() + TICK_S
    while time.clock_gettime_ns(_REALTIME_COARSE) <= newest_ns and time.monotonic() < end_s:
        time.sleep(0.001)


def find_left_out(target: str, after: Walk, difference: Difference) -> frozenset[bytes]:
    """Return the paths of the difference that must not be in the tree."""
    special = {
        path
        for path in difference.changed
        if contents.is_special(after[path]) or contents.is_lock(path, after[path])
    }
    suspects = [path for path in difference.changed if contents.may_hold_secret(path, after[path])]
    secret = {
        path: data
        for path, data in open_files(target, after, suspects, contents.MAX_SECRET_BYTES)
        if contents.holds_secret(path, data)
    }
    if secret:
        records = [path for path in after if path.endswith(b".dist-info/RECORD")]
        for path, data in open_files(target, after, records, contents.MAX_METADATA_BYTES):
            site = path.removesuffix(b"/RECORD").rpartition(b"/")[0]
            record = contents.read_record(data)
            for fetched in [each for each in secret if contents.is_of_record(each, secret[each], site, record)]:
                del secret[fetched]
    left_out = special | secret.keys()
    left_out |= {
        path
        for path in difference.changed
        if path.endswith(b".pyc") and any(contents.is_bytecode_of(path, source) for source in secret)
    }
    return frozenset(left_out)


def check_links(
    target: str, after: Walk, difference: Difference, caches: Sequence[str], targets: Sequence[str]
) -> None:
    """Raise CaptureRefused for links into a cache, which uv makes with UV_LINK_MODE=symlink."""
    for path in difference.changed:
        link = after[path].target
        if not link:
            continue
        place = posixpath.join(target, os.fsdecode(path.rpartition(b"/")[0]), os.fsdecode(link))
        place = posixpath.normpath(place)
        if any(contents.is_within(place, each) for each in targets):
            continue
        if any(contents.is_within(place, cache) for cache in caches):
            shown = to_utf8_text(os.path.join(target, os.fsdecode(path)))
            raise CaptureRefused(
                f"{shown}: is a link into a cache ({to_utf8_text(place)}), which other nodes do not have; install "
                "copies (UV_LINK_MODE=copy)"
            )


def to_utf8_text(path: str) -> str:
    """Return a path for messages and documents, which are UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
