"""The manifest of a striped version, described in docs/reference/formats.md, as records.

In: bytes from a store, which are not trusted. Out: records whose sizes are bounded, whose names stay in the
version's directory, and whose numbers are consistent; otherwise one error that names the fault. No I/O.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from bootseer.checkpoint.format.layout import Layout
from bootseer.errors import FormatVersion, IntegrityError
from bootseer.formats import other_format

FORMAT = "bootseer-stripe/1"
MANIFEST_NAME = "manifest.json"
POINTER_NAME = "LATEST"
DIRECTORY_PREFIX = "v-"

MAX_MANIFEST_BYTES = 256 << 20
MAX_FILES = 1 << 20
MAX_STRIPES = 1024
MAX_PATH_BYTES = 1024
MIN_UNIT_BYTES = 4096
MAX_UNIT_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 50
MAX_UNITS = 1 << 24  # of all files together

_VERSION = re.compile(r"[0-9]{20}-[0-9a-f]{12}")
_STRIPE = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")


class StripedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of the checkpoint and where its units are."""

    path: str  # relative, as a saver named it: "model.safetensors", "rank0/__0_0.distcp"
    size: int  # bytes
    unit_bytes: int
    stripes: list[str]  # stripe files in the version's directory; unit i is in stripes[i % len(stripes)]
    sums: list[int]  # CRC32C of each unit, in order

    @property
    def layout(self) -> Layout:
        return Layout(self.size, self.unit_bytes, len(self.stripes))


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One complete version; written last, under a name of its own, and never changed."""

    format: str
    version: str  # "<created_ns, 20 digits>-<12 hex digits>": sorts by time; its directory is v-<version>
    created_ns: int  # wall clock of the writer, since the epoch; larger than that of all versions it found there
    step: int | None  # training step, if the saver gave it
    writer: str  # program and version that wrote it
    files: list[StripedFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class _Head(msgspec.Struct):
    """The fields at the start of every version of the format."""

    format: str


def encode(manifest: Manifest) -> bytes:
    """Encode it for storage. Raises IntegrityError for a manifest that no reader would accept."""
    _check(manifest, "this manifest")
    body = msgspec.json.encode(manifest)
    return body + _trailer(body)


def decode(data: bytes, where: str) -> Manifest:
    """Decode and verify a manifest.

    Args: where: names it in errors.

    Raises: FormatVersion for another format or a newer version of it; IntegrityError for everything else.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
    body, _, _ = data.partition(b"\n")
    try:
        head = msgspec.json.decode(body, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not a manifest, or is damaged: {error}") from error
    if head.format != FORMAT:
        raise other_format(head.format, FORMAT, where)
    if data[len(body) :] != _trailer(body):
        raise IntegrityError(f"{where}: is damaged: its SHA-256 is not the one in its second line")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is damaged: {error}") from error
    _check(manifest, where)
    return manifest


def _trailer(body: bytes) -> bytes:
    return b'\n{"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def digest(data: bytes) -> str:
    """Return the SHA-256 in hex, which identifies a manifest on all nodes of a job."""
    return hashlib.sha256(data).hexdigest()


def is_version(name: str) -> bool:
    """Return whether a name is a version's, without the prefix of its directory."""
    return _VERSION.fullmatch(name) is not None


def is_unit(unit_bytes: int) -> bool:
    """Return whether units may have this size."""
    return MIN_UNIT_BYTES <= unit_bytes <= MAX_UNIT_BYTES and unit_bytes % MIN_UNIT_BYTES == 0


def directory_of(version: str) -> str:
    return DIRECTORY_PREFIX + version


def version_of(directory: str) -> str:
    """Return the version of a directory name, "" if it is not a version's."""
    name = directory.removeprefix(DIRECTORY_PREFIX)
    return name if name != directory and is_version(name) else ""


def is_file_path(path: str) -> bool:
    """Return whether a checkpoint file may have this path: relative, inside, the same on all systems."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        return False
    if any(char in path for char in "\0\\\n\r") or any(0xD800 <= ord(char) < 0xE000 for char in path):
        return False
    return all(name not in ("", ".", "..") for name in path.split("/"))


def _check(manifest: Manifest, where: str) -> None:
    """Check a manifest. Raises IntegrityError unless all numbers and names are consistent."""

    def wrong(what: str) -> IntegrityError:
        return IntegrityError(f"{where}: {what}")

    if manifest.format != FORMAT:
        raise FormatVersion(f"{where}: has format {manifest.format[:80]!r}, not {FORMAT}")
    if not is_version(manifest.version):
        raise wrong(f"version {manifest.version[:80]!r} is invalid")
    if manifest.created_ns != int(manifest.version[:20]):
        raise wrong(f"created_ns {manifest.created_ns} is not that of version {manifest.version}")
    if manifest.step is not None and not 0 <= manifest.step < 1 << 62:
        raise wrong(f"step {manifest.step} is invalid")
    if len(manifest.writer) > 200:
        raise wrong("writer is too long")
    if len(manifest.files) > MAX_FILES:
        raise wrong(f"has {len(manifest.files)} files; at most {MAX_FILES}")
    paths: set[str] = set()
    stripes: set[str] = set()
    units = 0
    for file in manifest.files:
        name = repr(file.path[:80])
        if not is_file_path(file.path):
            raise wrong(f"file path {name} is not allowed")
        if file.path in paths:
            raise wrong(f"file {name} occurs twice")
        paths.add(file.path)
        if not 0 <= file.size <= MAX_FILE_BYTES:
            raise wrong(f"size {file.size} of {name} is invalid")
        if not is_unit(file.unit_bytes):
            raise wrong(f"unit_bytes {file.unit_bytes} of {name} is invalid: not a multiple of {MIN_UNIT_BYTES}")
        if not 1 <= len(file.stripes) <= MAX_STRIPES:
            raise wrong(f"{name} has {len(file.stripes)} stripes; 1 to {MAX_STRIPES}")
        for stripe in file.stripes:
            if _STRIPE.fullmatch(stripe) is None or stripe == MANIFEST_NAME:
                raise wrong(f"stripe name {stripe[:80]!r} of {name} is not allowed")
            if stripe in stripes:
                raise wrong(f"stripe {stripe} belongs to two files")
            stripes.add(stripe)
        expected = file.layout.units
        units += expected
        if units > MAX_UNITS:
            raise wrong(f"has more than {MAX_UNITS} units")
        if len(file.sums) != expected:
            raise wrong(f"{name} has {expected} units and {len(file.sums)} checksums")
        if any(not 0 <= each < 1 << 32 for each in file.sums):
            raise wrong(f"a checksum of {name} is not a CRC32C")
    for path in paths:
        parts = path.split("/")
        for count in range(1, len(parts)):
            if "/".join(parts[:count]) in paths:
                raise wrong(f"{path[:80]!r} is below a file")
