"""An OCI image layout: a directory with `oci-layout`, `index.json` and blobs named by their digests.

Source: opencontainers/image-spec 1.1, image-layout.md.
"""

from __future__ import annotations

import os
import platform as this_platform
from io import FileIO
from typing import BinaryIO, cast

from bootseer.errors import ConfigError, IntegrityError, Truncated
from bootseer.storage.oci.manifest import (
    INDEXES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    check_digest,
    parse_index,
    parse_manifest,
    to_document,
)
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.builder.image_config import choose, platform_of, read_config

MAX_NESTED = 4  # indexes in indexes


class LayoutImage:
    """An image in a layout directory; a source of layers.

    `platform`: such as "linux/amd64", by default that of this machine. `reference`: the image's name in the
    layout, if it contains several. Raises: ConfigError, IntegrityError, StorageError.
    """

    def __init__(self, folder: str, *, platform: str | None = None, reference: str | None = None) -> None:
        self._directory = os.path.abspath(folder)
        wanted = platform or platform_of(this_platform.machine())
        if not os.path.isfile(os.path.join(self._directory, "oci-layout")):
            raise ConfigError(f"{self._directory}: is not an OCI image layout: there is no file oci-layout in it")
        document, where = self._read("index.json", MAX_MANIFEST_BYTES), os.path.join(self._directory, "index.json")
        found = to_document(document, INDEXES[0], where)
        for _ in range(MAX_NESTED):
            chosen = choose(parse_index(found, where), wanted, where, reference=reference)
            where = self._path(chosen)
            found = to_document(self._read_blob(chosen, MAX_MANIFEST_BYTES), chosen.media_type, where)
            if found.media_type not in INDEXES:
                break
            reference = None  # names are those of the outermost index
        else:
            raise ConfigError(f"{self._directory}: indexes are nested more than {MAX_NESTED} deep")
        manifest = parse_manifest(found, where)
        self.layers = manifest.layers
        self.config = self._read_blob(manifest.config, MAX_CONFIG_BYTES)
        architecture = read_config(self.config, self.layers, where).config.architecture
        if architecture and architecture != wanted.split("/")[1]:
            raise ConfigError(f"{self._directory}: the image is for {architecture}, not for {wanted}")

    def open(self, layer: Descriptor) -> BinaryIO:
        """Open the stored bytes of a layer; the reader verifies them."""
        path = self._path(layer)
        with map_os_errors(path):
            return cast(BinaryIO, _Blob(path))

    def _read_blob(self, blob: Descriptor, max_bytes: int) -> bytes:
        where = self._path(blob)
        if blob.size > max_bytes:
            raise IntegrityError(f"{where}: has {blob.size} bytes; at most {max_bytes}")
        data = self._read(where, blob.size)
        if len(data) < blob.size:
            raise Truncated(f"{where}: has {len(data)} bytes instead of {blob.size}")
        check_digest(data, blob.digest, where)
        return data

    def _read(self, path: str, max_bytes: int) -> bytes:
        path = os.path.join(self._directory, path)
        with map_os_errors(path), open(path, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise IntegrityError(f"{path}: is longer than {max_bytes} bytes")
        return data

    def _path(self, blob: Descriptor) -> str:
        algorithm, _, digits = blob.digest.partition(":")
        return os.path.join(self._directory, "blobs", algorithm, digits)


class _Blob(FileIO):
    """A file whose errors are mapped to Bootseer's."""

    def read(self, size: int | None = -1, /) -> bytes:
        with map_os_errors(os.fspath(self.name)):
            return super().read(size) or b""
