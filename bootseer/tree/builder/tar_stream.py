"""A streaming reader of tar archives: members with their attributes, and their data if requested at once.

In: untrusted chunks of bytes. Out: members as in image layers, with nanoseconds and extended attributes if the
archive has them, and data as pieces of a tree. tarfile parses the headers. It reads from a forward-only object
that limits headers to MAX_HEADER_BYTES, regardless of their claims.

Source: POSIX pax, GNU tar's manual ("Storing Sparse Files"), star's SCHILY keywords.
"""

from __future__ import annotations

import re
import stat
import tarfile
from collections.abc import Iterator
from typing import NamedTuple, cast

from bootseer.errors import IntegrityError, Truncated
from bootseer.tree.index import (
    BLOCK_BYTES,
    MAX_FILE_BYTES,
    MAX_TARGET_BYTES,
    MAX_XATTR_BYTES,
    OVERLAY_XATTRS,
    is_xattr,
)

MAX_HEADER_BYTES = 8 << 20  # of one member, with names, attributes and the map of a sparse file
NS = 1_000_000_000
_XATTR = "SCHILY.xattr."
_TIME = re.compile(r"(-?)([0-9]{1,20})(?:\.([0-9]*))?")
_TYPES = {
    **dict.fromkeys((tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE), stat.S_IFREG),
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}
# Exceptions of tarfile for invalid archives.
_WRONG = (tarfile.TarError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError, EOFError)


class TarMember(NamedTuple):
    """One member. A hard link has a `link`, and its attributes are ignored."""

    number: int  # in the archive, from 0
    path: bytes  # as in the archive
    mode: int  # with its type
    uid: int
    gid: int
    mtime_ns: int
    size: int  # bytes of a regular file, with holes
    target: bytes  # of a symbolic link
    link: bytes | None  # of a hard link: the other name
    rdev: tuple[int, int] | None
    xattrs: list[tuple[bytes, bytes]]  # sorted
    data_offset: int  # in the archive, bytes
    ranges: list[tuple[int, int]]  # offset in the file, bytes: ranges with data, in order


class TarStream:
    """Iterates over members; `read_pieces` returns the data of the last one."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._where = where
        self._tape = _ForwardFile(chunks, where)
        self.skipped_xattrs = 0

    def __iter__(self) -> Iterator[TarMember]:
        tape, number = self._tape, 0
        tape.max_bytes = MAX_HEADER_BYTES
        if tape.is_at_end():  # some tools write an empty layer so
            return
        try:
            archive = tarfile.TarFile(fileobj=tape, mode="r", encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            while True:
                tape.max_bytes = MAX_HEADER_BYTES
                found = archive.next()
                tape.max_bytes = None
                if found is None:
                    break
                archive.members.clear()  # type: ignore[attr-defined]  # else tarfile keeps all
                member = self._member(number, found)
                yield member
                number += 1
        except _WRONG as error:
            raise IntegrityError(f"{self._where}: is not a tar archive, or is damaged: {error}") from error
        # tarfile mistakes an unreadable header for the end.
        if tape.last.strip(b"\0"):
            raise IntegrityError(f"{self._where}: has a damaged header at byte {tape.tell() - len(tape.last)}")
        tape.drain()

    def read_pieces(self, member: TarMember) -> Iterator[bytes | int]:
        """Yield its pieces in order: bytes, or a number of pieces that are holes."""
        tape = self._tape
        tape.seek(member.data_offset)
        if member.ranges == [(0, member.size)]:
            left = member.size
            while left:
                piece = tape.read_all(min(left, BLOCK_BYTES))
                left -= len(piece)
                yield piece
            return
        yield from _sparse_pieces(tape, member)

    def _member(self, number: int, found: tarfile.TarInfo) -> TarMember:
        kind = stat.S_IFREG if found.islnk() else _TYPES.get(found.type)
        name = _bytes(found.pax_headers.get("GNU.sparse.name", found.name))  # tarfile prefers an invented path
        if kind is None:
            raise IntegrityError(f"{self._where}: {name[:200]!r} is of unknown type {found.type!r}")
        target = _bytes(found.linkname) if kind == stat.S_IFLNK else b""
        if kind == stat.S_IFLNK and (not 0 < len(target) <= MAX_TARGET_BYTES or b"\0" in target):
            raise IntegrityError(f"{self._where}: {name[:200]!r} is a link with an impossible target")
        is_file = kind == stat.S_IFREG and not found.islnk()
        size = found.size if is_file else 0
        if not 0 <= size <= MAX_FILE_BYTES:
            raise IntegrityError(f"{self._where}: {name[:200]!r} has {size} bytes")
        ranges = [(0, size)] if size else []
        if is_file and found.sparse is not None:
            ranges = self._ranges(name, cast(list[tuple[int, int]], found.sparse), size)
        rdev = (found.devmajor, found.devminor) if kind in (stat.S_IFCHR, stat.S_IFBLK) else None
        return TarMember(
            number=number,
            path=name,
            mode=kind | (0o777 if kind == stat.S_IFLNK else found.mode & 0o7777),  # as on Linux
            uid=found.uid,
            gid=found.gid,
            mtime_ns=_mtime_ns(found),
            size=size,
            target=target,
            link=_bytes(found.linkname) if found.islnk() else None,
            rdev=rdev,
            xattrs=self._xattrs(found),
            data_offset=found.offset_data,
            ranges=ranges,
        )

    def _ranges(self, name: bytes, found: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
        """Return the ranges of a sparse file; each begins at or after the end of the one before."""
        end = 0
        ranges = []
        for offset, length in found:
            if not length:
                continue
            if length < 0 or offset < end or offset + length > size:
                raise IntegrityError(f"{self._where}: {name[:200]!r} has an impossible map of its holes")
            end = offset + length
            ranges.append((offset, length))
        return ranges

    def _xattrs(self, found: tarfile.TarInfo) -> list[tuple[bytes, bytes]]:
        pairs = []
        total = 0
        for key in sorted(found.pax_headers, key=_bytes):
            if key.startswith(_XATTR):
                # Undo the quoting of GNU tar, as "=" ends a keyword.
                name = _bytes(key[len(_XATTR) :]).replace(b"%3D", b"=").replace(b"%25", b"%")
                value = _bytes(found.pax_headers[key])
                total += len(name) + len(value)
                if not is_xattr(name) or name.startswith(OVERLAY_XATTRS) or total > MAX_XATTR_BYTES:
                    total -= len(name) + len(value)
                    self.skipped_xattrs += 1
                else:
                    pairs.append((name, value))
        return pairs


def _sparse_pieces(tape: _ForwardFile, member: TarMember) -> Iterator[bytes | int]:
    """Yield pieces of a sparse file, whose data lies range after range in the archive."""
    pieces = -(-member.size // BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)
    done = 0  # pieces yielded so far
    current = -1  # the piece in `buffer`
    for begin, count in member.ranges:
        offset, length = begin, count
        while length:
            piece, inside = divmod(offset, BLOCK_BYTES)
            if piece != current:
                if current >= 0:
                    yield bytes(buffer)
                    done = current + 1
                if piece > done:
                    yield piece - done
                current = piece
                buffer = bytearray(min(BLOCK_BYTES, member.size - piece * BLOCK_BYTES))
            part = tape.read_all(min(length, BLOCK_BYTES - inside))
            buffer[inside : inside + len(part)] = part
            offset += len(part)
            length -= len(part)
    if current >= 0:
        yield bytes(buffer)
        done = current + 1
    if pieces > done:
        yield pieces - done


def _mtime_ns(found: tarfile.TarInfo) -> int:
    """Return the time with all digits of pax, which tarfile converts to a float."""
    text = found.pax_headers.get("mtime")
    if text is None:
        return int(found.mtime) * NS
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a time")
    sign, seconds, digits = match.groups()
    whole = int(seconds) * NS + int(((digits or "") + "0" * 9)[:9])
    return -whole if sign else whole


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class _ForwardFile:
    """The forward-only file that tarfile reads from."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks = chunks
        self._where = where
        self._chunk = b""
        self._at = 0  # in the chunk
        self._position = 0
        self.last = b""  # the last result of `read`
        self.max_bytes: int | None = None  # limit for `read` until it is set again

    def tell(self) -> int:
        return self._position

    def is_at_end(self) -> bool:
        return not self._fill()

    def read(self, size: int) -> bytes:
        """Read `size` bytes; fewer only at the end."""
        if self.max_bytes is not None:
            self.max_bytes -= size
            if self.max_bytes < 0:
                raise IntegrityError(f"{self._where}: has a header of more than {MAX_HEADER_BYTES} bytes")
        parts = []
        left = size
        while left > 0 and self._fill():
            part = self._chunk[self._at : self._at + left]
            parts.append(part)
            self._at += len(part)
            self._position += len(part)
            left -= len(part)
        self.last = parts[0] if len(parts) == 1 else b"".join(parts)
        return self.last

    def read_all(self, size: int) -> bytes:
        """Read exactly `size` bytes. Raises: Truncated."""
        data = self.read(size)
        if len(data) < size:
            raise Truncated(f"{self._where}: ends within a file")
        return data

    def seek(self, position: int) -> int:
        if position < self._position:
            raise IntegrityError(f"{self._where}: a header leads back to byte {position}")
        left = position - self._position
        while left and self._fill():
            step = min(left, len(self._chunk) - self._at)
            self._at += step
            self._position += step
            left -= step
        return self._position

    def drain(self) -> None:
        """Read to the end, so that all checksums are computed."""
        while self._fill():
            self._position += len(self._chunk) - self._at
            self._at = len(self._chunk)

    def _fill(self) -> bool:
        """Return whether there is more."""
        while self._at == len(self._chunk):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._chunk, self._at = chunk, 0
        return True
