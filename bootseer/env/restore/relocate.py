"""Relocation of an environment: files that contain their own path are rewritten for another path.

PURE but for `relocate`, which works in a freshly unpacked directory before other processes see it. Environments
may lie anywhere in a target (as those of uv tool and pipx). Rewritten are: first lines of scripts in all forms
that installers write, activate scripts, pyvenv.cfg, .pth, direct_url.json, settings below share/ and etc/ (as
Jupyter's kernel.json), absolute links, and the checksums of these files in RECORD. URLs, JSON and shells spell
paths in other forms, which are rewritten, too. Times and bytecode stay valid. Reported are other texts that
contain the old path, and scripts with a missing interpreter. Environments with paths in files that cannot be
rewritten safely are refused.

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
from bootseer.mounts.sandbox.shared_library import find_run_paths
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.unpack.safe_directories import LastDirectory

MAX_TEXT_BYTES = 4 << 20
MAX_SHEBANG_BYTES = 127  # including "#!"; the limit of kernels before 5.1
_ELF = b"\x7fELF"
_BELOW = (
    # a directory of the target, except those of packages' own files
    rb"(?:(?!(?:.*/)?(?:site|dist)-packages/).*/)?"
)
_SCRIPTS = re.compile(_BELOW + rb"(?:bin|Scripts)/[^/]+", re.DOTALL)
_URL = re.compile(rb"(?:.*/)?[^/]+\.dist-info/direct_url\.json", re.DOTALL)
_NAMED = re.compile(
    rb"(?:.*/)?(?:pyvenv\.cfg|[^/]+\.pth|[^/]+\.egg-link|uv-receipt\.toml|pipx_(?:metadata|shared)\.json)",
    re.DOTALL,
)
_RECORD = re.compile(rb"(?:(.*)/)?[^/]+\.dist-info/RECORD", re.DOTALL)
_EDITABLE = re.compile(rb"(?:.*/)?__editable__[^/]*\.py", re.DOTALL)
_LIBRARY = re.compile(rb".*\.so(?:\.[0-9.]+)?", re.DOTALL)
# A first line that is valid for /bin/sh and a string in Python: pip quotes with ", uv with ' or not at all.
_TRAMPOLINE = re.compile(rb"#!/bin/sh\n'''exec' ([^\n]*)\n' '''\n")
_WORD = re.compile(rb"""\"([^\"$`\\\n]+)\"|((?:'[^'\n]*'|\"'\")+)|([^\s\"'$`\\]+)""")
_SETTINGS = re.compile(_BELOW + rb"(?:share|etc)/.*|(?:.*/)?[^/]+\.(?:pc|cmake|desktop|service)", re.DOTALL)
_BYTES_LOOKED_AT = 1 << 20  # maximum of a text that is only searched
MAX_NAMED = 20  # lines for the user

Moves = Sequence[tuple[bytes, bytes]]  # (old path of a target, new path), absolute
_Spelling = Callable[[bytes], bytes]


class RefusedError(Exception):
    """The reason why an environment cannot be relocated; names the file."""


def replace_paths(data: bytes, moves: Moves) -> bytes:
    """Replace every path at or below an old place; longer names are left alone."""
    ordered = sorted(moves, key=lambda move: -len(move[0]))
    places = dict(ordered)
    either = b"|".join(re.escape(old) for old, _ in ordered)
    # Not inside a path or name, and not before a longer name.
    pattern = re.compile(rb"(?<![\w.\-~+@%])(?:" + either + rb")(?![\w.\-~+@%])")
    return pattern.sub(lambda match: places[match[0]], data)


def spelled_moves(path: bytes, moves: Moves) -> Moves:
    """PURE: return the moves in the spellings that a file of this name may use."""
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
    """Rewrite a file of `bin` that is not a binary.

    If the interpreter's path is too long, or has a space, /bin/sh starts the script. Data after a zero byte, such
    as an archive that Python runs, stay unchanged.
    """
    first_end, text_end = data.find(b"\n") + 1 or len(data), data.find(b"\0")
    found = _TRAMPOLINE.match(data)
    head_end = found.end() if found is not None else first_end if data.startswith(b"#!") else 0
    body = data[head_end:] if text_end >= 0 else replace_paths(data[head_end:], spelled_moves(b"", moves))
    if found is not None:
        program, rest = split_program(found[1])
        if program.startswith(b"/") and (moved := replace_paths(program, moves)) != program:
            return _first_lines(moved, rest) + body
        return data[:head_end] + body  # another interpreter, or one relative to the script
    if not head_end:
        return body
    words = data[2:first_end].strip()
    program = next((old for old, _ in moves if words.startswith(old + b"/")), b"")
    if not program:
        return data[:head_end] + body
    # The interpreter's own name has no space; the rest of the line is one argument.
    end = words.find(b" ", len(program))
    program, rest = (words, b"") if end < 0 else (words[:end], words[end:])
    moved = replace_paths(program, moves)
    line = b"#!" + moved + rest
    if len(line) <= MAX_SHEBANG_BYTES and b" " not in moved:
        return line + b"\n" + body
    return _first_lines(moved, rest + b' "$0" "$@"') + body


def split_program(command: bytes) -> tuple[bytes, bytes]:
    """Split a shell command into its first word, unquoted, and the rest.

    Return b"" as the first word if it has several parts, as `"$(dirname "$0")"/python`.
    """
    found = _WORD.match(command)
    if found is None or command[found.end() : found.end() + 1] not in (b"", b" "):
        return b"", command
    if found[2] is not None:
        parts = re.findall(rb"""'([^'\n]*)'|\"(')\"""", found[2])
        return b"".join(plain or quote for plain, quote in parts), command[found.end() :]
    return found[1] or found[3], command[found.end() :]


def interpreter_of(data: bytes) -> bytes:
    """Return the absolute path of a script's interpreter; b"" if it is not given as such."""
    found = _TRAMPOLINE.match(data)
    if found is not None:
        program, _ = split_program(found[1])
        return program if program.startswith(b"/") else b""
    first = data[:4096].partition(b"\n")[0]
    words = first[2:].split()
    return words[0] if first.startswith(b"#!") and words and words[0].startswith(b"/") else b""


def rewrite_record(data: bytes, directory: bytes, moves: Moves, rewritten: Mapping[bytes, bytes]) -> bytes:
    """Update the checksums of rewritten files in a RECORD.

    Args: folder: of the packages, relative to the target. rewritten: new contents, by paths relative to the
        target.
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
            content = rewritten.get(posixpath.normpath(posixpath.join(directory, path)))
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
    """Return the content of a file at the new place.

    Args: path: relative to the target. data: all of the file; of a library nothing.
    Raises: RefusedError.
    """
    if _SCRIPTS.fullmatch(path):
        is_script = data.startswith(b"#!") or b"\0" not in data
        return rewrite_script(data, moves) if is_script and not data.startswith(_ELF) else data
    if _URL.fullmatch(path) or _NAMED.fullmatch(path) or (_SETTINGS.fullmatch(path) and b"\0" not in data):
        return replace_paths(data, spelled_moves(path, moves))
    if _EDITABLE.fullmatch(path) and replace_paths(data, moves) != data:
        raise RefusedError(f"{_shown(path)} contains its own path; install that package without -e")
    return data


def is_text(path: bytes) -> bool:
    """Return whether `rewrite` has to process a file."""
    return any(pattern.fullmatch(path) for pattern in (_SCRIPTS, _URL, _NAMED, _EDITABLE, _SETTINGS))


def why_not(index: Index, *, is_relocatable: bool) -> str:
    """Return why a tree cannot be relocated, as far as its names show; "" if nothing prevents it."""
    if not is_relocatable:
        return "its snapshot is not relocatable"
    for entry, name in enumerate(index.names):
        if name.endswith(b".json") and entry and index.names[index.parents[entry]] == b"conda-meta":
            return f"{_shown(index.path(entry))} belongs to conda, whose packages contain their own path"
    return ""


def relocate(index: Index, tree_fd: int, moves: Moves, where: str) -> list[str]:
    """Rewrite files in a directory that was just unpacked from `index` and that no other process sees.

    Return a line for each file that still contains the old path, and for each script with a missing interpreter.
    Raises: ConfigError if relocation is not possible, with the reason; StorageError.
    """
    with LastDirectory(tree_fd) as directories, map_os_errors(where):
        try:
            return _relocate(index, directories, moves, where)
        except RefusedError as error:
            raise ConfigError(
                f"{where}: the environment cannot be relocated from {os.fsdecode(moves[0][0])}: {error}"
            ) from None


def _relocate(index: Index, directories: LastDirectory, moves: Moves, where: str) -> list[str]:
    told: list[str] = []
    paths = {path for _, path in _paths(index)}
    rewritten: dict[bytes, bytes] = {}
    changed: dict[int, bytes] = {}  # by entry of the first name
    records: list[tuple[bytes, bytes]] = []  # with the directory of the packages
    for entry, path in _paths(index):
        mode = index.modes[entry]
        first = entry if index.links[entry] == -1 else index.links[entry]
        if stat.S_ISLNK(mode):
            _relink(index, entry, directories, moves)
            continue
        if not stat.S_ISREG(mode):
            continue
        if found := _RECORD.fullmatch(path):
            records.append((path, found[1] or b""))
            continue
        if _LIBRARY.fullmatch(path) or _SCRIPTS.fullmatch(path):
            with _File(directories, path) as file:
                _check_library(file, path, moves)
        is_program = index.sizes[entry] > MAX_TEXT_BYTES
        if not is_text(path) or is_program:
            with _File(directories, path) as file:
                names_it = _names_place(file.read(0, _BYTES_LOOKED_AT), spelled_moves(path, moves))
            if names_it and first not in changed:
                told.append(f"{_shown(path)} still contains the old path")
            continue
        with _File(directories, path) as file:
            data = file.read(0, MAX_TEXT_BYTES)
            made = rewrite(path, data, moves)
            if made != data:
                file.write(made)
                rewritten[path] = changed[first] = made
            elif first in changed:  # under another name
                rewritten[path] = made
        starter = interpreter_of(made) if _SCRIPTS.fullmatch(path) else b""
        if starter and not _is_there(starter, os.fsencode(where), paths):
            told.append(f"{_shown(path)} needs the interpreter {_shown(starter)}, which does not exist")
    for path, directory in records:
        with _File(directories, path) as file:
            data = file.read(0, MAX_TEXT_BYTES + 1)
            if len(data) > MAX_TEXT_BYTES:
                raise RefusedError(f"{_shown(path)} is too long to rewrite")
            made = rewrite_record(data, directory, moves, rewritten)
            if made != data:
                file.write(made)
    return told


def _names_place(data: bytes, moves: Moves) -> bool:
    """Return whether a text contains an old path; binary files, such as bytecode, are ignored."""
    return b"\0" not in data and any(old in data for old, _ in moves) and replace_paths(data, moves) != data


def _is_there(program: bytes, target: bytes, paths: Set[bytes]) -> bool:
    """Return whether an interpreter is in the tree, in the directory below it, or on this node."""
    inside = program.removeprefix(target + b"/")
    return (inside != program and inside in paths) or os.path.exists(program)


def _paths(index: Index) -> Iterator[tuple[int, bytes]]:
    paths = [b""] * len(index)
    for entry in range(1, len(index)):
        above = paths[index.parents[entry]]
        paths[entry] = above + b"/" + index.names[entry] if above else index.names[entry]
        yield entry, paths[entry]


def _relink(index: Index, entry: int, directories: LastDirectory, moves: Moves) -> None:
    """Replace an absolute link into a target."""
    target = index.targets[entry]
    made = replace_paths(target, moves)
    if not target.startswith(b"/") or made == target:
        return
    path = index.path(entry)
    *above, name = path.split(b"/")
    fd = directories.open(tuple(above))
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
            raise RefusedError(f"{_shown(path)} searches libraries in {_shown(each)}")


class _File:
    """A file of the unpacked tree; its times are preserved."""

    def __init__(self, folders: LastDirectory, path: bytes) -> None:
        *above, self._name = path.split(b"/")
        self._directory_fd = folders.open(tuple(above))
        self._fd = -1

    def __enter__(self) -> _File:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(self._name, flags, dir_fd=self._directory_fd)
        except PermissionError:  # its owner may not read it
            os.chmod(self._name, 0o600, dir_fd=self._directory_fd)
            self._fd = os.open(self._name, flags, dir_fd=self._directory_fd)
        self._status = os.fstat(self._fd)
        if not stat.S_ISREG(self._status.st_mode):
            os.close(self._fd)
            raise IntegrityError(f"{_shown(self._name)}: another process changes files where the tree is unpacked")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def write(self, data: bytes) -> None:
        """Write in place, so that hard links stay linked."""
        mode = stat.S_IMODE(self._status.st_mode)
        os.fchmod(self._fd, mode | 0o200)
        fd = os.open(
            self._name, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory_fd
        )
        with open(fd, "wb") as file:
            file.write(data)
        os.fchmod(self._fd, mode)
        os.utime(self._fd, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))


def _first_lines(program: bytes, rest: bytes) -> bytes:
    quoted = b'"' + program + b'"'
    if re.search(rb"[\"$`\\]", program):  # what the shell expands also between "
        quoted = b"'" + program.replace(b"'", b"'\"'\"'") + b"'"
    return b"#!/bin/sh\n'''exec' " + quoted + rest + b"\n' '''\n"


def _shown(path: bytes) -> str:
    return ascii(os.fsdecode(path))[1:-1][:300]
