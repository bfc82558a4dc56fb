"""Captures what set-up commands do to target folders: a look before, a look after, then a tree of the difference.

    capture = Capture(targets, environ)
    capture.begin(); ...; capture.end()    # the ranks wait for these two
    capture.build(put)                     # nobody waits for this: at idle priority while they run

What is in the tree is what was there at `end`. A file that changes before it has been read ends the capture:
nothing is published, and the job goes on.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bootseer import priority
from bootseer.counted import counted
from bootseer.env import contents, outside
from bootseer.env.compiling import Compiler
from bootseer.env.difference import Difference, compare
from bootseer.env.inside import HERE, Inside
from bootseer.env.leaving_out import check_links, find_left_out, show
from bootseer.env.scratch import scratch
from bootseer.env.source import EnvSource, Part, open_files
from bootseer.env.walk import Walk, walk
from bootseer.errors import CaptureRefused, ConfigError, EditableRefused
from bootseer.storage.cpu_limits import usable_cores
from bootseer.tree.block_codec import Codec
from bootseer.tree.building import BuiltTree, Progress, build
from bootseer.tree.packing import Put

MOST_NAMES = 1000  # of a list of facts
MOST_POINTER_BYTES = 1 << 20
_REALTIME_COARSE = 5  # that files are stamped by; the time module does not name it
TICK_S = 0.05  # more than any kernel's clock takes to step


class Changes(NamedTuple):
    """What `end` found."""

    changed: int  # names that are new or different, folders too
    deleted: int
    outside: list[str]  # what was written outside the targets
    took_s: float

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.deleted)


class Facts(NamedTuple):
    """What is to be told of a captured environment; paths are absolute, with what is no UTF-8 escaped."""

    files: int
    bytes: int
    deleted: int
    compiled: int  # .pyc files that were made for it
    left_out: list[str]  # credentials and the like
    outside: list[str]  # what was written outside the targets
    required: list[str]  # declared inputs that a node must have at the same path
    notes: list[str]


class Built(NamedTuple):
    """An environment whose packs are with the sink."""

    tree: BuiltTree
    facts: Facts


class Capture:
    """One capture; see the module's docstring.

    Args:
        targets: absolute folders, none within another; they need not exist before.
        environ: of the set-up commands: says where caches are, that of Bootseer too.
        inputs: declared files and folders; packages may be installed in place from them.
        python: the ranks' interpreter, for targets that have none of their own.
        cwd: where the commands run. `name`: stands in the tree's index.
        without: files that change outside the targets for reasons of ours, as the log.
        inside: where the commands run.
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
        inside: Inside = HERE,
    ) -> None:
        self._targets = [os.path.normpath(target) for target in targets]
        _check_targets(self._targets)
        self._environ = dict(environ)
        self._inputs = list(inputs)
        self._python = python
        self._inside = inside
        self._name = name
        self._caches = outside.cache_folders(environ)
        self._places = outside.places(environ, self._targets, cwd)
        self._not_outside = [*self._caches, *self._targets, *map(os.path.realpath, self._targets), *without]
        self._before: list[Walk] = []
        self._seen_before: outside.Seen = {}
        self._after: list[Walk] = []
        self._differences: list[Difference] = []
        self._outside: list[str] = []

    def begin(self) -> None:
        """Looks at what is there before the commands. Raises: StorageError; ConfigError."""
        self._before = self._walk()
        self._seen_before = outside.look(self._places, self._not_outside)

    def end(self) -> Changes:
        """Looks again, when they have ended. Raises: CaptureRefused; StorageError; ConfigError."""
        started_s = time.monotonic()
        self._after = self._walk()
        for target, after in zip(self._targets, self._after, strict=True):
            if b"" not in after:
                raise CaptureRefused(
                    f"{target}: is not there after set-up: name the folder that it changes by --setup-target"
                )
        self._differences = [compare(*each) for each in zip(self._before, self._after, strict=True)]
        self._before = []
        seen = outside.look(self._places, self._not_outside)
        self._outside = [show(path) for path in outside.compare(self._seen_before, seen, self._not_outside)]
        return Changes(
            sum(len(each.changed) for each in self._differences),
            sum(len(each.deleted) for each in self._differences),
            self._outside,
            time.monotonic() - started_s,
        )

    def left(self) -> list[tuple[str, Walk, list[bytes]]]:
        """Of each target: its path, how it was at `end`, and the names that set-up made, changed or deleted."""
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
        """Builds the tree.

        Args: as `bootseer.tree.building.build`. `on_progress` is called at least every second or so, also without
        news; what it raises ends the build. `is_idle`: at the lowest priorities of CPU and disk.
        Raises: SourceChanged; EditableRefused, CaptureRefused; StorageError; what `put` raises.
        """
        progress = _Stoppable(on_progress)
        # A thread of its own: its priorities cannot be raised again.
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
        """Caches that lie in a target."""
        prefix = target.rstrip("/") + "/"
        return frozenset(os.fsencode(each[len(prefix) :]) for each in self._caches if each.startswith(prefix))

    def _build(
        self, put: Put, hot_paths: Sequence[bytes], codec: Codec, threads: int | None, on_progress: Progress
    ) -> Built:
        required = self._judge_pointers()
        notes: list[str] = []
        left_out: list[str] = []
        parts = []
        with scratch(self._environ) as folder:
            workers = threads or usable_cores()
            compiler = Compiler(folder, self._python, workers, on_progress, notes, self._inside)
            for target, after, difference in zip(self._targets, self._after, self._differences, strict=True):
                check_links(target, after, difference, self._caches, self._targets)
                gone = find_left_out(target, after, difference)
                left_out += [
                    show(os.path.join(target, os.fsdecode(path)))
                    for path in sorted(gone)
                    if not contents.is_lock(path, after[path])  # nobody misses it
                ]
                made = compiler.compile(target, after, [path for path in difference.changed if path not in gone])
                parts.append(Part(target, after, difference, gone, made))
            source = EnvSource(parts, scratch=folder, name=self._name)
            tree = build(source, put, hot_paths=hot_paths, codec=codec, threads=threads, on_progress=on_progress)
        for what, count in tree.statistics.left_out.items():
            notes.append(f"{count} x {what} could not be kept")
        facts = Facts(
            files=tree.statistics.files,
            bytes=tree.statistics.raw_bytes,
            deleted=sum(len(each.deleted) for each in self._differences),
            compiled=sum(len(part.compiled) for part in parts),
            left_out=left_out[:MOST_NAMES],
            outside=self._outside,
            required=required,
            notes=notes,
        )
        return Built(tree, facts)

    def _judge_pointers(self) -> list[str]:
        """Inputs that packages are installed in place from. Raises: EditableRefused."""
        pointers: list[contents.Pointer] = []
        for target, after, difference in zip(self._targets, self._after, self._differences, strict=True):
            paths = [
                path
                for path in difference.changed
                if contents.metadata_kind(path) and stat.S_ISREG(after[path].mode)
            ]
            for path, data in open_files(target, after, paths, MOST_POINTER_BYTES):
                pointers += contents.find_pointers(path, data)
        resolved = [contents.Pointer(each.name, os.path.realpath(each.folder)) for each in pointers]
        targets = [*self._targets, *map(os.path.realpath, self._targets)]
        inputs = {os.path.realpath(each): each for each in self._inputs}
        found = contents.judge_pointers(resolved, targets, inputs)
        if found.refused:
            first = found.refused[0]
            more = len({each.name for each in found.refused}) - 1
            others = f" (and {counted(more, 'more package')} so)" if more else ""
            raise EditableRefused(
                f"{first.name} is installed in place from {first.folder}{others}, which is in no target, so other "
                f"nodes may not have it: declare it if they do (--setup-input {first.folder}), "
                "or install it without -e"
            )
        return sorted({show(inputs[each]) for each in found.required})


class _Stoppable:
    """Progress of a build that ends when its caller was interrupted."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self.is_stopped = False

    def __call__(self, count: int, files: int) -> None:
        if self.is_stopped:
            raise CaptureRefused("the capture was interrupted")
        if self._on_progress is not None:
            self._on_progress(count, files)


def _check_targets(targets: Sequence[str]) -> None:
    """Raises: ConfigError for targets that are one, or within one another."""
    if not targets:
        raise ConfigError("there is no target: name the folder that set-up commands change by --setup-target")
    resolved = [os.path.realpath(target) for target in targets]
    for one, target in enumerate(resolved):
        for other in range(one):
            if contents.is_within(target, resolved[other]) or contents.is_within(resolved[other], target):
                raise ConfigError(
                    f"{targets[other]} and {targets[one]}: one target lies in the other: name the outer one"
                )


def _wait_for_tick(newest_ns: int) -> None:
    """Until a change from now on has another time than any that was seen.

    The kernel stamps files by a clock that steps every few milliseconds: an edit in the same step as the one
    before it would look like none.
    """
    end_s = time.monotonic() + TICK_S
    while time.clock_gettime_ns(_REALTIME_COARSE) <= newest_ns and time.monotonic() < end_s:
        time.sleep(0.001)
