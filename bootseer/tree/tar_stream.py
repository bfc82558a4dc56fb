"""A tar archive as it streams by: members with their attributes, and their data if it is asked for at once.

In: chunks of bytes, which are not trusted. Out: members as layers mean them, with nanoseconds and extended
attributes where the archive has them, data as pieces of a tree. tarfile parses the headers; it reads from an
object that only goes forward and lets no header be larger than MOST_HEADER_BYTES, whatever it claims.

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
    MOST_FILE_BYTES,
    MOST_TARGET_BYTES,
    MOST_XATTR_BYTES,
    OVERLAY_XATTRS,
    is_xattr,
)

MOST_HEADER_BYTES = 8 << 20  # of one member, with names, attributes and the map of a sparse file
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
# What tarfile lets out of archives that are none.
_WRONG = (tarfile.TarError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError, EOFError)


class TarMember(NamedTuple):
    """One member. A hard link has a `link` and no attributes that count."""

    number: int  # in the archive, from 0
    path: bytes  # as it is there
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
    ranges: list[tuple[int, int]]  # offset in the file, bytes: where data is, in order

    @property
    def is_link(self) -> bool:
        return self.link is not None


class TarStream:
    """Iterates over members; `read_pieces` gives the data of the last one."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._where = where
        self._tape = _Tape(chunks, where)
        self.skipped_xattrs = 0

    def __iter__(self) -> Iterator[TarMember]:
        tape, number = self._tape, 0
        tape.most_bytes = MOST_HEADER_BYTES
        if tape.is_at_end():  # as some tools write a layer that changes nothing
            return
        try:
            archive = tarfile.TarFile(fileobj=tape, mode="r", encoding="utf-8", errors="surrogateescape")  # type: ignore[arg-type]
            while True:
                tape.most_bytes = MOST_HEADER_BYTES
                found = archive.next()
                tape.most_bytes = None
                if found is None:
                    break
                archive.members.clear()  # type: ignore[attr-defined]  # else all are kept
                member = self._member(number, found)
                yield member
                number += 1
        except _WRONG as error:
            raise IntegrityError(f"{self._where}: is no tar archive, or damaged: {error}") from error
        # tarfile takes a header that it cannot read for the end.
        if tape.last.strip(b"\0"):
            raise IntegrityError(f"{self._where}: has a damaged header at byte {tape.tell() - len(tape.last)}")
        tape.drain()

    def read_pieces(self, member: TarMember) -> Iterator[bytes | int]:
        """Its pieces in order: bytes, or how many pieces that are holes come."""
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
        name = _bytes(found.pax_headers.get("GNU.sparse.name", found.name))  # tarfile prefers a made-up path
        if kind is None:
            raise IntegrityError(f"{self._where}: {name[:200]!r} is of unknown type {found.type!r}")
        target = _bytes(found.linkname) if kind == stat.S_IFLNK else b""
        if kind == stat.S_IFLNK and (not 0 < len(target) <= MOST_TARGET_BYTES or b"\0" in target):
            raise IntegrityError(f"{self._where}: {name[:200]!r} is a link to nothing that can be")
        is_file = kind == stat.S_IFREG and not found.islnk()
        size = found.size if is_file else 0
        if not 0 <= size <= MOST_FILE_BYTES:
            raise IntegrityError(f"{self._where}: {name[:200]!r} has {size} bytes")
        ranges = [(0, size)] if size else []
        if is_file and found.sparse is not None:
            ranges = self._ranges(name, cast(list[tuple[int, int]], found.sparse), size)
        rdev = (found.devmajor, found.devminor) if kind in (stat.S_IFCHR, stat.S_IFBLK) else None
        return TarMember(
            number=number,
            path=name,
            mode=kind | (0o777 if kind == stat.S_IFLNK else found.mode & 0o7777),  # as links have it on Linux
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
        """Of a sparse file; each range begins where the one before ends, or later."""
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
                # As GNU tar writes them, since "=" ends a keyword.
                name = _bytes(key[len(_XATTR) :]).replace(b"%3D", b"=").replace(b"%25", b"%")
                value = _bytes(found.pax_headers[key])
                total += len(name) + len(value)
                if not is_xattr(name) or name.startswith(OVERLAY_XATTRS) or total > MOST_XATTR_BYTES:
                    total -= len(name) + len(value)
                    self.skipped_xattrs += 1
                else:
                    pairs.append((name, value))
        return pairs


def _sparse_pieces(tape: _Tape, member: TarMember) -> Iterator[bytes | int]:
    """Data of a sparse file lies range after range in the archive."""
    pieces = -(-member.size // BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)
    done = 0  # pieces that were given
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
    """With the digits of pax, which tarfile makes a float of."""
    text = found.pax_headers.get("mtime")
    if text is None:
        return int(found.mtime) * NS
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no time")
    sign, seconds, digits = match.groups()
    whole = int(seconds) * NS + int(((digits or "") + "0" * 9)[:9])
    return -whole if sign else whole


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class _Tape:
    """What tarfile reads from: a file that only goes forward."""

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks = chunks
        self._where = where
        self._chunk = b""
        self._at = 0  # in the chunk
        self._position = 0
        self.last = b""  # of `read`
        self.most_bytes: int | None = None  # that `read` may give before it is set again

    def tell(self) -> int:
        return self._position

    def is_at_end(self) -> bool:
        return not self._fill()

    def read(self, size: int) -> bytes:
        """Fewer only at the end."""
        if self.most_bytes is not None:
            self.most_bytes -= size
            if self.most_bytes < 0:
                raise IntegrityError(f"{self._where}: has a header of more than {MOST_HEADER_BYTES} bytes")
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
        """Raises: Truncated."""
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
        """To the end, so that all sums are seen."""
        while self._fill():
            self._position += len(self._chunk) - self._at
            self._at = len(self._chunk)

    def _fill(self) -> bool:
        """Whether there is more."""
        while self._at == len(self._chunk):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._chunk, self._at = chunk, 0
        return True
