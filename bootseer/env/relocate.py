"""An environment at another path than the one that it was made for: files that name their own place are rewritten.

PURE but for `relocate`, which does it in a folder where all files were just unpacked, before anybody sees them.
Rewritten, wherever in a target environments lie (as those of uv tool and pipx): first lines of scripts in any form
that installers write, activate scripts, pyvenv.cfg, .pth, direct_url.json, settings below share/ and etc/ (as
Jupyter's kernel.json), absolute links, and the sums of all that in RECORD; also where URLs, JSON or shells spell
paths otherwise. Times stay, and bytecode with them. Named: other texts that have the old place, and scripts whose
interpreter is not there. Refused, with the reason: what keeps its place in files that cannot be rewritten safely.

Source: execve(2) and pip's distlib (`'''exec'` for first lines that are too long); PEP 376, 610, 660; elf(5).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from urllib.parse import quote

from bootseer.errors import ConfigError, IntegrityError
from bootseer.mounts.shared_library import find_run_paths
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.safe_folders import LastFolder

MOST_TEXT_BYTES = 4 << 20
MOST_SHEBANG_BYTES = 127  # with the "#!", as kernels before 5.1 have it
_ELF = b"\x7fELF"
_BELOW = (
    rb"(?:(?!(?:.*/)?(?:site|dist)-packages/).*/)?"  # a folder of the target, but those of packages' own files
)
_SCRIPTS = re.compile(_BELOW + rb"(?:bin|Scripts)/[^/]+", re.DOTALL)
_URL = re.compile(rb"(?:.*/)?[^/]+\.dist-info/direct_url\.json", re.DOTALL)
_NAMED = re.compile(
    rb"(?:.*/)?(?:pyvenv\.cfg|[^/]+\.pth|[^/]+\.egg-link|uv-receipt\.toml|pipx_(?:metadata|shared)\.json)",
    re.DOTALL,
)
_RECORD = re.compile(rb"(?:(.*)/)?[^/]+\.dist-info/RECORD", re.DOTALL)
_EDITABLE = re.compile(rb"(?:.*/)?__editable__[^/]*\.py", re.DOTALL)
_CONDA = re.compile(rb"conda-meta/[^/]+\.json")
_LIBRARY = re.compile(rb".*\.so(?:\.[0-9.]+)?", re.DOTALL)
# What /bin/sh runs and Python takes for a text: pip quotes with ", uv with ' or not at all.
_TRAMPOLINE = re.compile(rb"#!/bin/sh\n'''exec' ([^\n]*)\n' '''\n")
_WORD = re.compile(rb"""\"([^\"$`\\\n]+)\"|((?:'[^'\n]*'|\"'\")+)|([^\s\"'$`\\]+)""")
_SETTINGS = re.compile(_BELOW + rb"(?:share|etc)/.*|(?:.*/)?[^/]+\.(?:pc|cmake|desktop|service)", re.DOTALL)
_BYTES_LOOKED_AT = 1 << 20  # of a text that is only searched
MOST_NAMED = 20  # lines for people

Moves = Sequence[tuple[bytes, bytes]]  # (where a target was, where it is), absolute
_Spelling = Callable[[bytes], bytes]


class RefusedError(Exception):
    """Why an environment cannot be moved to another path; names the file."""


def replace_paths(data: bytes, moves: Moves) -> bytes:
    """Every path at or below an old place becomes one of the new place; longer names are left alone."""
    ordered = sorted(moves, key=lambda move: -len(move[0]))
    places = dict(ordered)
    either = b"|".join(re.escape(old) for old, _ in ordered)
    # Not in the middle of a path or a name, and not before one that only begins alike.
    pattern = re.compile(rb"(?<![\w.\-~+@%])(?:" + either + rb")(?![\w.\-~+@%])")
    return pattern.sub(lambda match: places[match[0]], data)


def spelled_moves(path: bytes, moves: Moves) -> Moves:
    """PURE: the same as a file of this name may have the old place, and as it is to have the new one."""
    ways: list[tuple[_Spelling, _Spelling]]
    if _URL.fullmatch(path):
        ways = [(_in_url, _in_url), (_in_url_of_uv, _in_url), (bytes, _in_url)]
    elif path.endswith(b".json"):
        ways = [(_in_ascii_json, _in_ascii_json), (_in_json, _in_json)]
    else:
        ways = [(bytes, bytes), (_in_quotes, _in_quotes), (_in_quotes_of_fish, _in_quotes_of_fish)]
    found: dict[bytes, bytes] = {}
    for old, new in moves:
        for spell, respell in ways:
            found.setdefault(spell(old), respell(new))
    return list(found.items())


def _in_url(place: bytes) -> bytes:
    return quote(place).encode()


def _in_url_of_uv(place: bytes) -> bytes:
    return quote(place, safe="/'!$&()*+,;=:@").encode()


def _in_ascii_json(place: bytes) -> bytes:
    return json.dumps(os.fsdecode(place))[1:-1].encode()


def _in_json(place: bytes) -> bytes:
    return os.fsencode(json.dumps(os.fsdecode(place), ensure_ascii=False)[1:-1])


def _in_quotes(place: bytes) -> bytes:
    return place.replace(b"'", b"'\"'\"'")


def _in_quotes_of_fish(place: bytes) -> bytes:
    return place.replace(b"'", b"'\\''")


def rewrite_script(data: bytes, moves: Moves) -> bytes:
    """A file of `bin` that is no program. One whose interpreter's path is too long, or has a space, is started by
    /bin/sh. What stands behind a zero byte, as of an archive that Python runs, stays."""
    first_end, text_end = data.find(b"\n") + 1 or len(data), data.find(b"\0")
    found = _TRAMPOLINE.match(data)
    head_end = found.end() if found is not None else first_end if data.startswith(b"#!") else 0
    body = data[head_end:] if text_end >= 0 else replace_paths(data[head_end:], spelled_moves(b"", moves))
    if found is not None:
        program, rest = split_program(found[1])
        if program.startswith(b"/") and (moved := replace_paths(program, moves)) != program:
            return _first_lines(moved, rest) + body
        return data[:head_end] + body  # not ours, or told from where the script is
    if not head_end:
        return body
    words = data[2:first_end].strip()
    program = next((old for old, _ in moves if words.startswith(old + b"/")), b"")
    if not program:
        return data[:head_end] + body
    # The interpreter's own name has no space; what is left of the line is one argument.
    end = words.find(b" ", len(program))
    program, rest = (words, b"") if end < 0 else (words[:end], words[end:])
    moved = replace_paths(program, moves)
    line = b"#!" + moved + rest
    if len(line) <= MOST_SHEBANG_BYTES and b" " not in moved:
        return line + b"\n" + body
    return _first_lines(moved, rest + b' "$0" "$@"') + body


def split_program(command: bytes) -> tuple[bytes, bytes]:
    """The first word of a command of the shell, without its quotes, and what follows; b"" for one that is made
    of parts, as `"$(dirname "$0")"/python`."""
    found = _WORD.match(command)
    if found is None or command[found.end() : found.end() + 1] not in (b"", b" "):
        return b"", command
    if found[2] is not None:
        parts = re.findall(rb"""'([^'\n]*)'|\"(')\"""", found[2])
        return b"".join(plain or quote for plain, quote in parts), command[found.end() :]
    return found[1] or found[3], command[found.end() :]


def interpreter_of(data: bytes) -> bytes:
    """What starts a script, as an absolute path; b"" where that is told by other means."""
    found = _TRAMPOLINE.match(data)
    if found is not None:
        program, _ = split_program(found[1])
        return program if program.startswith(b"/") else b""
    first = data[:4096].partition(b"\n")[0]
    words = first[2:].split()
    return words[0] if first.startswith(b"#!") and words and words[0].startswith(b"/") else b""


def rewrite_record(data: bytes, folder: bytes, moves: Moves, rewritten: Mapping[bytes, bytes]) -> bytes:
    """A RECORD with the sums of what was rewritten.

    Args: folder: that of the packages, from the target on; rewritten: what files have now, by such paths.
    """
    rows = list(csv.reader(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="")))
    is_changed = False
    for row in rows:
        if not row:
            continue
        path = row[0].encode("utf-8", "surrogateescape")
        if path.startswith(b"/"):
            moved = replace_paths(path, moves)
            if moved != path:
                row[0], is_changed = moved.decode("utf-8", "surrogateescape"), True
        else:
            content = rewritten.get(posixpath.normpath(posixpath.join(folder, path)))
            if content is not None and len(row) >= 3 and row[1]:
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
                row[1:3] = f"sha256={digest.decode()}", str(len(content))
                is_changed = True
    if not is_changed:
        return data
    text = io.StringIO(newline="")
    newline = "\r\n" if b"\r\n" in data else "\n"
    csv.writer(text, lineterminator=newline).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def rewrite(path: bytes, data: bytes, moves: Moves) -> bytes:
    """What a file has at the new place. Args: path: from the target on; data: all of it, or of a library nothing.

    Raises: RefusedError.
    """
    if _SCRIPTS.fullmatch(path):
        is_script = data.startswith(b"#!") or b"\0" not in data
        return rewrite_script(data, moves) if is_script and not data.startswith(_ELF) else data
    if _URL.fullmatch(path) or _NAMED.fullmatch(path) or (_SETTINGS.fullmatch(path) and b"\0" not in data):
        return replace_paths(data, spelled_moves(path, moves))
    if _EDITABLE.fullmatch(path) and replace_paths(data, moves) != data:
        raise RefusedError(f"{_shown(path)} names its place: install that package without -e")
    return data


def is_text(path: bytes) -> bool:
    """Whether a file is one that `rewrite` has to see."""
    return any(pattern.fullmatch(path) for pattern in (_SCRIPTS, _URL, _NAMED, _EDITABLE, _SETTINGS))


def why_not(index: Index, *, is_relocatable: bool) -> str:
    """Why a tree cannot be moved, as far as its names tell; "" if nothing says so."""
    if not is_relocatable:
        return "its snapshot says that it belongs at its own path"
    for entry, name in enumerate(index.names):
        if name.endswith(b".json") and entry and index.names[index.parents[entry]] == b"conda-meta":
            return f"{_shown(index.path(entry))} is conda's, whose packages have their place in their files"
    return ""


def relocate(index: Index, tree_fd: int, moves: Moves, where: str) -> list[str]:
    """Rewrites files in a folder that has just been unpacked from `index` and that nobody else sees.

    Returns: what still names the old place, and scripts whose interpreter is not there, a line each.
    Raises: ConfigError when it cannot be, with the reason; StorageError.
    """
    with LastFolder(tree_fd) as folders, map_os_errors(where):
        try:
            return _relocate(index, folders, moves, where)
        except RefusedError as error:
            raise ConfigError(
                f"{where}: the environment cannot be moved there from {os.fsdecode(moves[0][0])}: {error}"
            ) from None


def _relocate(index: Index, folders: LastFolder, moves: Moves, where: str) -> list[str]:
    told: list[str] = []
    paths = {path for _, path in _paths(index)}
    rewritten: dict[bytes, bytes] = {}
    changed: dict[int, bytes] = {}  # by entry of the first name
    records: list[tuple[bytes, bytes]] = []  # and the folder of the packages
    for entry, path in _paths(index):
        mode = index.modes[entry]
        first = entry if index.links[entry] == -1 else index.links[entry]
        if stat.S_ISLNK(mode):
            _relink(index, entry, folders, moves)
            continue
        if not stat.S_ISREG(mode):
            continue
        if found := _RECORD.fullmatch(path):
            records.append((path, found[1] or b""))
            continue
        if _LIBRARY.fullmatch(path) or _SCRIPTS.fullmatch(path):
            with _File(folders, path) as file:
                _check_library(file, path, moves)
        is_program = index.sizes[entry] > MOST_TEXT_BYTES
        if not is_text(path) or is_program:
            with _File(folders, path) as file:
                names_it = _names_place(file.read(0, _BYTES_LOOKED_AT), spelled_moves(path, moves))
            if names_it and first not in changed:
                told.append(f"{_shown(path)} still names the old place")
            continue
        with _File(folders, path) as file:
            data = file.read(0, MOST_TEXT_BYTES)
            made = rewrite(path, data, moves)
            if made != data:
                file.write(made)
                rewritten[path] = changed[first] = made
            elif first in changed:  # by another name
                rewritten[path] = made
        starter = interpreter_of(made) if _SCRIPTS.fullmatch(path) else b""
        if starter and not _is_there(starter, os.fsencode(where), paths):
            told.append(f"{_shown(path)} is started by {_shown(starter)}, which is not there")
    for path, folder in records:
        with _File(folders, path) as file:
            data = file.read(0, MOST_TEXT_BYTES + 1)
            if len(data) > MOST_TEXT_BYTES:
                raise RefusedError(f"{_shown(path)} is too long to be rewritten")
            made = rewrite_record(data, folder, moves, rewritten)
            if made != data:
                file.write(made)
    return told


def _names_place(data: bytes, moves: Moves) -> bool:
    """Whether a text has an old path; of what is no text, as bytecode, nobody reads it."""
    return b"\0" not in data and any(old in data for old, _ in moves) and replace_paths(data, moves) != data


def _is_there(program: bytes, target: bytes, paths: Set[bytes]) -> bool:
    """Whether an interpreter is in the tree, in what the tree lies over, or on this node."""
    inside = program.removeprefix(target + b"/")
    return (inside != program and inside in paths) or os.path.exists(program)


def _paths(index: Index) -> Iterator[tuple[int, bytes]]:
    paths = [b""] * len(index)
    for entry in range(1, len(index)):
        above = paths[index.parents[entry]]
        paths[entry] = above + b"/" + index.names[entry] if above else index.names[entry]
        yield entry, paths[entry]


def _relink(index: Index, entry: int, folders: LastFolder, moves: Moves) -> None:
    """An absolute link to somewhere in a target."""
    target = index.targets[entry]
    made = replace_paths(target, moves)
    if not target.startswith(b"/") or made == target:
        return
    path = index.path(entry)
    *above, name = path.split(b"/")
    fd = folders.open(tuple(above))
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    os.unlink(name, dir_fd=fd)
    os.symlink(made, name, dir_fd=fd)
    if os.geteuid() == 0:
        os.chown(name, found.st_uid, found.st_gid, dir_fd=fd, follow_symlinks=False)
    os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=fd, follow_symlinks=False)


def _check_library(file: _File, path: bytes, moves: Moves) -> None:
    if file.read(0, len(_ELF)) != _ELF:
        return
    for each in find_run_paths(file.read):
        if replace_paths(each, moves) != each:
            raise RefusedError(f"{_shown(path)} looks for libraries at {_shown(each)}")


class _File:
    """A file of the unpacked tree; its time stays as it is."""

    def __init__(self, folders: LastFolder, path: bytes) -> None:
        *above, self._name = path.split(b"/")
        self._folder_fd = folders.open(tuple(above))
        self._fd = -1

    def __enter__(self) -> _File:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(self._name, flags, dir_fd=self._folder_fd)
        except PermissionError:  # of a file that its owner may not read
            os.chmod(self._name, 0o600, dir_fd=self._folder_fd)
            self._fd = os.open(self._name, flags, dir_fd=self._folder_fd)
        self._status = os.fstat(self._fd)
        if not stat.S_ISREG(self._status.st_mode):
            os.close(self._fd)
            raise IntegrityError(f"{_shown(self._name)}: somebody else changes files where the tree is unpacked")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def write(self, data: bytes) -> None:
        """In place: a file with several names stays one."""
        mode = stat.S_IMODE(self._status.st_mode)
        os.fchmod(self._fd, mode | 0o200)
        fd = os.open(self._name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder_fd)
        with open(fd, "wb") as file:
            file.write(data)
        os.fchmod(self._fd, mode)
        os.utime(self._fd, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))


def _first_lines(program: bytes, rest: bytes) -> bytes:
    quoted = b'"' + program + b'"'
    if re.search(rb"[\"$`\\]", program):  # what the shell looks into, also between "
        quoted = b"'" + program.replace(b"'", b"'\"'\"'") + b"'"
    return b"#!/bin/sh\n'''exec' " + quoted + rest + b"\n' '''\n"


def _shown(path: bytes) -> str:
    return ascii(os.fsdecode(path))[1:-1][:300]
