"""Decides which of the files written under a mount become a version, and when; docs/guide/mount.md has the rules.

A save is a name at the top of the mount: a file, or a directory with everything below it. Files at the top that
are parts of one checkpoint are a save together. In: changes, closes and signs of completion. Out: versions, made
one after the other; an incomplete save never becomes one.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Sequence

from bootseer.backoff import Backoff
from bootseer.counted import counted
from bootseer.logs import get_logger
from bootseer.mounts.fuse.names import Directory, File, Node, Stored, Tree, error, files_of, find_files
from bootseer.mounts.fuse.protocol import MountedFiles, SavedFile, Saver
from bootseer.mounts.fuse.rules import (
    COMMIT_NAME,
    DCP_METADATA,
    POINTERS,
    find_missing,
    find_named,
    find_parts,
    find_step,
    is_part,
    is_side_file,
    is_temporary,
)
from bootseer.mounts.fuse.spool import SpoolFile

_log = get_logger(__name__)

FILE_SETTLE_S = 0.5  # a file that was closed may be renamed at once
RETRIES = Backoff(10.0, 300.0)
MAX_POINTER_BYTES = 4096
MAX_METADATA_BYTES = 256 << 20
PARTS = ""  # the save of the parts at the top
PATIENCE_S = 2.0  # for the end of a close, which the kernel reports after the close has returned

Snapshot = list[tuple[SavedFile, File]]


class PendingSave:
    """A name at the top, or `PARTS`, that was changed under this mount."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_changed = False
        self.has_writes = False  # not only removals
        self.is_asked = False  # a sign of completion was seen
        self.changed_s = time.monotonic()
        self.failures = 0
        self.retry_s = 0.0  # no try before


class PendingSaves:
    """All saves of a mount. `lock` is the mount's, under which the tree is read and changed.

    `settle_s`: a directory without changes for so long is complete; None: only explicit commits count.
    """

    def __init__(
        self,
        tree: Tree,
        saver: Saver,
        lock: threading.RLock,
        base: MountedFiles,
        *,
        settle_s: float | None,
    ) -> None:
        self._top, self._saver = tree.root.children, saver
        self._remove = tree.root.remove
        self._settle_s = settle_s
        self._lock = lock
        self._change = threading.Condition(lock)
        self._saves: dict[str, PendingSave] = {}
        self._saving: set[str] = set()  # names at the top that are being saved: their files must not change
        self._changes = 0
        self._versions = [base]
        self._has_new_sides = False  # small files at the top were written
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="mount-save", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def newest(self) -> MountedFiles:
        """Return the version that was made last, or the one that was mounted."""
        return self._versions[-1]

    # ---- calls of operations, with the lock held --------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Prepare a change at or below a name at the top: wait while that is being saved."""
        while name in self._saving and not self._is_stopped:
            self._change.wait()
        if self._is_stopped:
            raise error(errno.EIO)

    def note(self, node: Node, *, is_write: bool = True) -> None:
        """Record a change of a file or directory in the tree; `is_write` is False for a removal."""
        is_write = is_write and isinstance(node, File) and node.content is not None
        if isinstance(node, File) and is_write:
            self._changes += 1
            node.changed = self._changes
        if node.top in self._top:
            name = self._save_of(node)
            save = self._saves.setdefault(name, PendingSave(name))
            save.is_changed = True
            save.has_writes = save.has_writes or is_write
            save.is_asked = False
            save.changed_s = time.monotonic()
            save.retry_s = 0.0

    def closed(self, node: File) -> None:
        """Handle the close of a file by its last writer."""
        save = self._saves.get(self._save_of(node))
        if save is not None:
            save.changed_s = time.monotonic()
        if self._top.get(node.name) is node and _is_side(node) and not node.broken:
            self._has_new_sides = True
            if node.name in POINTERS and self._settle_s is not None:
                self._follow(node)
        self._change.notify_all()

    def renamed(self, node: Node, old_path: str) -> str | None:
        """Handle a rename; return the save that it completes."""
        self.removed(old_path.strip("/").partition("/")[0])
        for file in files_of(node):
            self.note(file)
        self._change.notify_all()
        if self._settle_s is None:
            return None
        is_top = self._top.get(node.name) is node
        if node.name == DCP_METADATA and (is_top or node.parent is self._top.get(node.top)):
            return self._save_of(node)
        if not is_top or (isinstance(node, File) and is_part(node.name)):
            return None
        if isinstance(node, File) and _is_side(node):
            self.closed(node)
            return next((name for name, save in self._saves.items() if save.is_asked), None)
        was_temporary = is_temporary(old_path.rpartition("/")[2])
        return node.name if was_temporary and not is_temporary(node.name) else None

    def removed(self, top: str) -> None:
        """Handle the removal of a name at or below the top."""
        found = self._top.get(top)
        if found is None:
            self._saves.pop(top, None)
            if PARTS in self._saves and not self._files(PARTS):
                del self._saves[PARTS]
        else:
            self.note(found, is_write=False)
            self._change.notify_all()

    def is_waiting(self, node: File) -> bool:
        """Return whether a file is a save by itself that will become a version."""
        save = self._saves.get(self._save_of(node)) if self._top.get(node.name) is node else None
        return save is not None and self._due_s(save) is not None

    # ---- commits, without the lock ----------------------------------------------------------------------------

    def commit(self, names: Iterable[str] | None, *, is_asked: bool = True) -> None:
        """Make one version of these saves, or of all that were changed; return when it exists.

        `is_asked`: the caller knows that they are complete; otherwise incomplete ones are left for later.
        Raises: OSError: EBUSY while a file is open for writing, EIO when one is broken or the version fails.
        """
        with self._lock:
            is_all = names is None
            wanted = [*self._saves] if names is None else [*names]
            self._await(wanted)
            chosen = []
            for name in wanted:
                save = self._saves.get(name)
                if save is None or not save.is_changed or not (save.has_writes or not is_all):
                    continue
                why = self._why_not(save, is_asked)
                if not why:
                    chosen.append(name)
                    continue
                _log.info("%s: not saved: %s", name or "parts", why)
                if is_asked:
                    raise error(errno.EBUSY if self._has_writers(name) else errno.EIO)
            chosen = [name for name in chosen if not self._is_side_name(name)]
            if not chosen and is_all and self._has_new_sides:
                chosen = self._newest_names()
            elif not chosen:
                return
            snapshot = self._begin_save(chosen)
        if self._save(chosen, snapshot) is not None:
            raise error(errno.EIO)

    def finish(self) -> None:
        """Save complete saves after the end of the mount, and log the incomplete ones."""
        with self._lock:
            self._is_stopped = True
            self._change.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            left = [save for save in self._saves.values() if save.is_changed and save.has_writes]
            left = [save for save in left if not self._is_side_name(save.name)]
            reasons = {save.name: self._why_not(save, False) for save in left}
            for name, why in reasons.items():
                if why:
                    _log.info("%s: not saved: %s", name or "parts", why)
            names = [name for name, why in reasons.items() if not why]
        for name in names:
            try:
                self.commit([name])
            except OSError:
                pass  # it is in the log
        if self._has_new_sides:
            sides = [name for name in self._saves if self._is_side_name(name)]
            _log.info("%s: not saved: small files at the top go with a save, and none followed", ", ".join(sides))

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._is_stopped:
                    return
                due = {name: at_s for name, save in self._saves.items() if (at_s := self._due_s(save)) is not None}
                first = min(due, key=lambda name: due[name], default=None)
                if first is None or self._saving:
                    self._change.wait()
                    continue
                wait_s = due[first] - time.monotonic()
                if wait_s > 0:
                    self._change.wait(wait_s)
                    continue
                snapshot = self._begin_save([first])
            self._save([first], snapshot)

    def _due_s(self, save: PendingSave) -> float | None:
        """Return when to save it without a request; None for not yet, and never."""
        if self._settle_s is None or not save.is_changed or not save.has_writes:
            return None
        if self._is_side_name(save.name) or self._why_not(save, False):
            return None
        wait_s = FILE_SETTLE_S if isinstance(self._top.get(save.name), File) else self._settle_s
        return max(save.retry_s, save.changed_s + (0.0 if save.is_asked else wait_s))

    def _why_not(self, save: PendingSave, is_asked: bool) -> str:
        """Return why a save is not complete, "" if it is."""
        files = [file for file in self._files(save.name) if file.content is not None]
        if not files:
            return "it was removed, or has no files"
        for file in files:
            if file.writers:
                return f"{file.path} is open for writing"
            if file.broken:
                return f"{file.path}: {file.broken}"
        if is_asked:
            return ""
        if is_temporary(save.name):
            return "its name is that of an unfinished file or directory"
        if isinstance(self._top.get(save.name), File):
            return ""
        start = len(save.name) + 1 if save.name else 0
        missing = find_missing({file.path[start:]: file.changed for file in files})
        return missing or next(filter(None, map(self._why_not_dcp, files)), "")

    def _why_not_dcp(self, file: File) -> str:
        """Return why a save of DCP is incomplete: a file in its metadata is not on this node."""
        content = file.content
        if file.name != DCP_METADATA or not isinstance(content, SpoolFile) or content.size > MAX_METADATA_BYTES:
            return ""
        if file.parts_at != file.changed:
            data = bytearray(content.size)
            content.read_into(memoryview(data), 0)
            file.parts_at, file.parts = file.changed, find_parts(data)
        assert file.parent is not None
        for name in sorted(file.parts - file.parent.children.keys()):
            return f"{file.path} names {name}, which is not here: savers on several nodes need BootseerWriter"
        return ""

    # ---- making a version -------------------------------------------------------------------------------------

    def _begin_save(self, names: Sequence[str]) -> Snapshot:
        """Begin a version of the saves and all small files at the top; block changes of them meanwhile."""
        found: dict[str, tuple[SavedFile, File]] = {}
        for file in [file for name in names for file in self._files(name)] + self._sides():
            path, content = file.path, file.content
            if isinstance(content, SpoolFile):
                found[path] = SavedFile(path, content.size, content.fd), file
            elif isinstance(content, Stored):
                found[path] = SavedFile(path, content.size, -1, content.files, content.path), file
        self._saving = {path.partition("/")[0] for path in found} | {*names}
        self._has_new_sides = False
        return list(found.values())

    def _save(self, names: Sequence[str], snapshot: Snapshot) -> BaseException | None:
        """Make the version; afterwards its files are read from there. Returns the error, if there was one."""
        started_s = time.monotonic()
        failure: BaseException | None = None
        files: MountedFiles | None = None
        steps = [step for name in names if (step := find_step(name)) is not None]
        try:
            files = self._saver.save([saved for saved, _ in snapshot], max(steps, default=None))
        except Exception as caught:  # on any error the files stay here and the save is retried
            failure = caught
        what = ", ".join(name for name in names if name) or "files at the top"
        if files is None:
            _log.info("%s: not saved: %s", what, failure or type(failure).__name__)
        else:
            size = sum(saved.size for saved, _ in snapshot)
            seconds = time.monotonic() - started_s
            _log.info(
                "%s: saved as %s, %s, %s bytes, %.1f s",
                what,
                files.version,
                counted(len(snapshot), "file"),
                size,
                seconds,
            )
        with self._lock:
            for name in {*names, *(self._save_of(file) for _, file in snapshot)}:
                save = self._saves.setdefault(name, PendingSave(name))
                if files is not None:
                    save.is_changed = save.has_writes = save.is_asked = False
                save.failures = 0 if files is not None else save.failures + 1
                save.retry_s = time.monotonic() + RETRIES.wait_s(save.failures)
            if files is None:
                self._has_new_sides = True
            else:
                self._take(files, names, snapshot)
            self._saving = set()
            self._change.notify_all()
        return failure

    def _take(self, files: MountedFiles, names: Sequence[str], snapshot: Snapshot) -> None:
        for saved, file in snapshot:
            if isinstance(file.content, SpoolFile):
                file.content.close()
            file.content = Stored(files, saved.path)
        self._versions.append(files)
        others = [node for name, node in self._top.items() if name not in names and isinstance(node, File)]
        for node in [node for node in others if not is_part(node.name) and names != [PARTS]]:
            is_stored = isinstance(node.content, Stored) and node.content.files is not files
            if len(names) == 1 and is_stored and find_step(node.name) is None and find_step(names[0]) is None:
                _log.info("%s: this newest version has no %s: save both in one directory", names[0], node.name)
                break
        keep = self._saver.keep
        if keep is not None:
            self._versions = self._versions[-keep:]
            for name, top in [*self._top.items()]:
                contents = [file.content for file in files_of(top)]
                is_spooled = any(isinstance(content, SpoolFile) for content in contents)
                old = any(isinstance(each, Stored) and each.files not in self._versions for each in contents)
                if old and not is_spooled:
                    self._remove(name)
                    self._saves.pop(name, None)

    def _await(self, names: Iterable[str]) -> None:
        """Wait until nothing is being saved, and pending closes are done."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            is_closing = any(self._is_closing(name) for name in names) and time.monotonic() < end_s
            if not self._saving and (not is_closing or self._is_stopped):
                return
            self._change.wait(0.05 if is_closing else None)

    def _follow(self, pointer: File) -> None:
        """Apply a pointer file: the directory that it names is complete."""
        content = pointer.content
        if not isinstance(content, SpoolFile) or content.size > MAX_POINTER_BYTES:
            return
        text = bytearray(content.size)
        content.read_into(memoryview(text), 0)
        directories = [name for name, node in self._top.items() if isinstance(node, Directory)]
        name = find_named(text.decode("utf-8", "replace"), directories)
        if name:
            self.note(self._top[name], is_write=False)
            save = self._saves[name]
            save.has_writes = save.is_asked = True

    def _save_of(self, node: Node) -> str:
        """Return the name of the save that a file or directory in the tree belongs to."""
        top = node.top
        return PARTS if isinstance(self._top.get(top), File) and is_part(top) else top

    def _files(self, name: str) -> list[File]:
        if name == PARTS:
            return [node for node in self._top.values() if isinstance(node, File) and is_part(node.name)]
        node = self._top.get(name)
        return [] if node is None else files_of(node)

    def _has_writers(self, name: str) -> bool:
        return any(file.writers for file in self._files(name))

    def _is_closing(self, name: str) -> bool:
        return any(file.closing for file in self._files(name))

    def _newest_names(self) -> list[str]:
        """Return the saves that the newest version holds."""
        nodes = [node for name, node in self._top.items() if not self._is_side_name(name)]
        return sorted({self._save_of(node) for node in nodes if find_files(node) is self.newest})

    def _sides(self) -> list[File]:
        nodes = [node for node in self._top.values() if isinstance(node, File) and _is_side(node)]
        return [node for node in nodes if not node.writers and not node.broken]

    def _is_side_name(self, name: str) -> bool:
        node = self._top.get(name)
        return isinstance(node, File) and _is_side(node)


def is_commit(path: str) -> bool:
    """Return whether a path is a sign of a complete save: at the top, or in a directory at the top."""
    names = path.strip("/").split("/")
    return len(names) in (1, 2) and names[-1] == COMMIT_NAME


def _is_side(node: File) -> bool:
    return node.content is not None and is_side_file(node.name, node.size) and not is_temporary(node.name)
