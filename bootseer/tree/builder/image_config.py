"""The configuration and the readable layers of an image; adds to bootseer.storage.oci.manifest. Pure.

Source: opencontainers/image-spec 1.1, config.md and layer.md; Docker's equivalent media types.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bootseer.errors import ConfigError, IntegrityError
from bootseer.storage.oci.manifest import INDEXES, MANIFESTS, Descriptor, ManifestIndex, Platform
from bootseer.tree.index import Config

MAX_LAYERS = 1000  # overlayfs supports 500
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer\.(nondistributable\.)?v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(foreign\.)?diff\.tar(\.gzip|\.zstd)?)"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386", "armv7l": "arm", "armv6l": "arm"}
_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_IS_ATTESTATION = "vnd.docker.reference.type"


class ImageConfig(NamedTuple):
    """The command and settings of an image, and the digests of its layers' archives, lowest first."""

    config: Config
    diff_ids: list[str]


def platform_of(machine: str) -> str:
    """Return the OCI name of Linux on a machine from `platform.machine()`: "linux/amd64"."""
    return f"linux/{_MACHINES.get(machine, machine)}"


def read_config(data: bytes, layers: Sequence[Descriptor], where: str) -> ImageConfig:
    """Read the configuration of an image with these layers.

    Raises: IntegrityError when it is invalid, or not of these layers; ConfigError for layers that are not tar.
    """
    if len(layers) > MAX_LAYERS:
        raise IntegrityError(f"{where}: has {len(layers)} layers; at most {MAX_LAYERS}")
    for layer in layers:
        if _LAYER.fullmatch(layer.media_type) is None:
            raise ConfigError(f"{where}: has a layer of type {layer.media_type}, which is not a plain tar archive")
    try:
        found = msgspec.json.decode(data, type=_Image)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: has no configuration of an image: {error}") from error
    diff_ids = found.rootfs.diff_ids or []
    if len(diff_ids) != len(layers):
        raise IntegrityError(
            f"{where}: the configuration names {len(diff_ids)} layers, the manifest {len(layers)}"
        )
    for diff_id in diff_ids:
        if _DIGEST.fullmatch(diff_id) is None:
            raise IntegrityError(f"{where}: the configuration names a layer {diff_id[:100]!r}, not a digest")
    run = found.config or _Run()
    config = Config(
        env=run.env or [],
        entrypoint=run.entrypoint or [],
        cmd=run.cmd or [],
        workdir=run.working_dir or "",
        user=run.user or "",
        architecture=found.architecture or "",
    )
    return ImageConfig(config, diff_ids)


def choose(index: ManifestIndex, platform: str, where: str, *, reference: str | None = None) -> Descriptor:
    """Choose the manifest, or the next index, for `os/architecture[/variant]` in an index of a layout.

    `reference`: accept only this name. Unlike in registries, an entry may omit its platform.
    Raises: ConfigError when there is none, or more than one.
    """
    wanted = platform.split("/")
    if not 2 <= len(wanted) <= 3 or not all(wanted):
        raise ConfigError(f"{platform!r} is not a platform: write it as linux/amd64 or linux/arm/v7")
    found = [
        each
        for each in index.manifests
        if each.media_type in (*MANIFESTS, *INDEXES)
        and not each.artifact_type
        and _IS_ATTESTATION not in each.annotations
        and (reference is None or reference in (each.annotations.get(name) for name in _NAMES))
    ]
    exact = [each for each in found if each.platform is not None and _fits(each.platform, wanted)]
    fitting = exact or [each for each in found if each.platform is None]
    if len({each.digest for each in fitting}) == 1:
        return fitting[0]
    what = f"image for {platform}" if reference is None else f"image {reference!r} for {platform}"
    there = ", ".join(sorted({_shown(each) for each in found}))[:300] or "no image"
    if not fitting:
        raise ConfigError(f"{where}: has no {what}; there is: {there}")
    raise ConfigError(f"{where}: has more than one {what}: request one by its name; there is: {there}")


class _RootFs(msgspec.Struct):
    diff_ids: list[str] | None = None


class _Run(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None


class _Image(msgspec.Struct):
    """The fields that a tree needs; others are ignored."""

    rootfs: _RootFs
    architecture: str | None = None
    config: _Run | None = None


def _fits(found: Platform, wanted: Sequence[str]) -> bool:
    """Return whether a platform matches; a variant matters only if both have one."""
    same = [found.os, found.architecture] == list(wanted[:2])
    return same and (len(wanted) < 3 or not found.variant or found.variant == wanted[2])


def _shown(each: Descriptor) -> str:
    platform = each.platform
    name = next((each.annotations[name] for name in _NAMES if name in each.annotations), "")
    shown = "any platform" if platform is None else f"{platform.os}/{platform.architecture}"
    return f"{name[:80]!r} for {shown}" if name else shown
