"""Reads the node's CDI specifications and the names of the libraries that they bind; cdi.py interprets them.

The author of one decides what every job sees, so only root's files, or this user's, are read. Nothing here fails a
job: a specification that cannot be used is reported, and the image uses its own files.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from bootseer.mounts.sandbox.binds import OWN_DIRECTORY
from bootseer.mounts.sandbox.cdi import KIND, DeviceEdits, find_devices
from bootseer.mounts.sandbox.shared_library import find_soname

DIRECTORIES = ("/etc/cdi", "/var/run/cdi")  # the later ones win
MAX_SPEC_BYTES = 8 << 20
MAX_SPECS = 100
LIBRARIES = f"{OWN_DIRECTORY}/lib"  # inside: links by the names that programs load
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_devices(directories: tuple[str, ...] = DIRECTORIES, dev: str = "/dev") -> DeviceEdits:
    """Return the needs of this node's accelerators inside an image.

    Returns: also links to bound libraries, in LIBRARIES.
    """
    notes: list[str] = []
    specs: list[tuple[str, Any]] = []
    for directory in directories:
        for name in _list(directory)[:MAX_SPECS]:
            path = os.path.join(directory, name)
            try:
                spec = _parse(path, _read(path))
            except (OSError, ValueError, RecursionError) as error:
                notes.append(f"CDI: {path} is not used: {error}")
            else:
                specs.append((path, spec))
    found = find_devices(specs)
    if not found.names and os.path.exists(os.path.join(dev, "nvidiactl")):
        notes.append(
            f"no CDI specification of {KIND} in {' or '.join(directories)}: the image must have the driver's "
            "libraries itself; `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` makes one"
        )
    links = list(found.links)
    for bind in found.binds:
        soname = _soname(bind.source)
        if soname:
            links.append((bind.target, f"{LIBRARIES}/{soname}"))
    return found._replace(links=tuple(links), notes=(*notes, *found.notes))


def _list(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith((".json", ".yaml", ".yml")))
    except OSError:
        return []


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & _OTHERS_WRITE:
            raise ValueError("users other than root may write to it")
        data = file.read(MAX_SPEC_BYTES + 1)
    if len(data) > MAX_SPEC_BYTES:
        raise ValueError(f"it has more than {MAX_SPEC_BYTES} bytes")
    return data


def _parse(path: str, data: bytes) -> Any:
    if path.endswith(".json"):
        return json.loads(data)
    try:
        return json.loads(data)  # JSON is YAML, and some tools write it so
    except ValueError:
        pass
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError(
            "it is YAML, and PyYAML is not installed: pip install pyyaml, or write it as JSON "
            "(nvidia-ctk cdi generate --format=json)"
        ) from None
    try:
        return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 (safe loaders)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None


def _soname(path: str) -> str:
    """Return the soname of a library of the node; "" for other files."""
    if ".so" not in os.path.basename(path):
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return ""
            return find_soname(lambda offset, size: os.pread(fd, size, offset) if offset < 1 << 62 else b"")
        finally:
            os.close(fd)
    except OSError:
        return ""
