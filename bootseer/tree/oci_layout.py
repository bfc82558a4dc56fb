"""An OCI image layout: a folder with `oci-layout`, `index.json` and blobs named by their digests.

Source: opencontainers/image-spec 1.1, image-layout.md.
"""

from __future__ import annotations

import os
import platform as this_platform
from io import FileIO
from typing import BinaryIO, cast

from bootseer.errors import ConfigError, IntegrityError, Truncated
from bootseer.storage.oci_manifest import (
    INDEXES,
    MOST_CONFIG_BYTES,
    MOST_MANIFEST_BYTES,
    Descriptor,
    check_digest,
    parse_index,
    parse_manifest,
    to_document,
)
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.image_config import choose, platform_of, read_config

MOST_NESTED = 4  # indexes in indexes


class LayoutImage:
    """An image of a layout folder; a source of layers.

    `platform` as "linux/amd64", by default that of this machine. `reference`: the image's name in the layout, for
    those that hold several. Raises: ConfigError, IntegrityError, StorageError.
    """

    def __init__(self, folder: str, *, platform: str | None = None, reference: str | None = None) -> None:
        self._folder = os.path.abspath(folder)
        wanted = platform or platform_of(this_platform.machine())
        if not os.path.isfile(os.path.join(self._folder, "oci-layout")):
            raise ConfigError(f"{self._folder}: is no OCI image layout: there is no file oci-layout in it")
        document, where = self._read("index.json", MOST_MANIFEST_BYTES), os.path.join(self._folder, "index.json")
        found = to_document(document, INDEXES[0], where)
        for _ in range(MOST_NESTED):
            chosen = choose(parse_index(found, where), wanted, where, reference=reference)
            where = self._path(chosen)
            found = to_document(self._read_blob(chosen, MOST_MANIFEST_BYTES), chosen.media_type, where)
            if found.media_type not in INDEXES:
                break
            reference = None  # names are those of the outermost index
        else:
            raise ConfigError(f"{self._folder}: indexes are nested more than {MOST_NESTED} deep")
        manifest = parse_manifest(found, where)
        self.layers = manifest.layers
        self.config = self._read_blob(manifest.config, MOST_CONFIG_BYTES)
        architecture = read_config(self.config, self.layers, where).config.architecture
        if architecture and architecture != wanted.split("/")[1]:
            raise ConfigError(f"{self._folder}: the image is for {architecture}, not for {wanted}")

    def open(self, layer: Descriptor) -> BinaryIO:
        """Its stored bytes, to be verified by whoever reads them."""
        path = self._path(layer)
        with map_os_errors(path):
            return cast(BinaryIO, _Blob(path))

    def _read_blob(self, blob: Descriptor, most_bytes: int) -> bytes:
        where = self._path(blob)
        if blob.size > most_bytes:
            raise IntegrityError(f"{where}: has {blob.size} bytes; at most {most_bytes}")
        data = self._read(where, blob.size)
        if len(data) < blob.size:
            raise Truncated(f"{where}: has {len(data)} bytes instead of {blob.size}")
        check_digest(data, blob.digest, where)
        return data

    def _read(self, path: str, most_bytes: int) -> bytes:
        path = os.path.join(self._folder, path)
        with map_os_errors(path), open(path, "rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise IntegrityError(f"{path}: is longer than {most_bytes} bytes")
        return data

    def _path(self, blob: Descriptor) -> str:
        algorithm, _, digits = blob.digest.partition(":")
        return os.path.join(self._folder, "blobs", algorithm, digits)


class _Blob(FileIO):
    """A file whose errors are ours."""

    def read(self, size: int | None = -1, /) -> bytes:
        with map_os_errors(os.fspath(self.name)):
            return super().read(size) or b""
