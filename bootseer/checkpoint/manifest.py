"""The manifest of a striped version: what docs/formats.md describes, as records.

A manifest comes from a store and is not trusted: sizes are bounded, names cannot leave the version's folder, and
what it says must add up before anybody acts on it.
"""

from __future__ import annotations

import msgspec

FORMAT = "bootseer-stripe/1"
MANIFEST_NAME = "manifest.json"
POINTER_NAME = "LATEST"


class StripedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of the checkpoint and where its units are."""

    path: str  # relative, as a saver named it: "model.safetensors", "rank0/__0_0.distcp"
    size: int  # bytes
    unit_bytes: int
    stripes: list[str]  # names of the stripe files in the version's folder; unit i is in stripes[i % len(stripes)]
    sums: list[int]  # CRC32C of each unit, in order


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One complete version; it is written last, under a name of its own, and never changed."""

    format: str
    version: str  # "<created_ns, 20 digits>-<12 hex digits>": sorts by time; the version's folder is v-<version>
    created_ns: int  # wall clock of the writer, since the epoch; more than that of all versions it found there
    step: int | None  # training step, if the saver said it
    writer: str  # program and version that wrote it
    files: list[StripedFile]
