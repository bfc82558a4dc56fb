"""PURE: the --image flags: the image of the ranks, and the paths of the node that are visible in it.

Mistakes are found before any process starts. The caller's function makes paths absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.mounts.sandbox.binds import Bind, UnboundPath, is_within, parse_bind
from bootseer.mounts.sandbox.environ import parse_variable
from launcher.ranks.environ import RANK_VARIABLES

ROOTFS = "rootfs:"
PYTHONS = ("python3", "python")  # names to search for on the image's PATH


class ImageOptions(NamedTuple):
    url: str
    name: str  # of the tree, "" for the URL's
    writable: str  # tmpfs, none or an absolute path
    binds: tuple[Bind | UnboundPath, ...]
    pythons: tuple[str, ...]  # the first one that exists is used
    environ: dict[str, str]
    late_python: str = ""  # the ranks' interpreter, if set-up makes it


def read_options(
    url: str | None,
    name: str | None,
    writable: str,
    binds: Sequence[str],
    python: str | None,
    environ: Sequence[str],
    absolute: Callable[[str], str],
    targets: Sequence[str] = (),
) -> ImageOptions | None:
    """Return the options; None without --image. Args: targets: of set-up, absolute. Raises: UsageError."""
    if url is None:
        for flag, value in (
            ("--image-name", name),
            ("--image-writable", writable if writable != "tmpfs" else None),
            ("--image-bind", binds),
            ("--image-python", python),
            ("--image-env", environ),
        ):
            if value:
                raise UsageError(f"{flag} has no effect without --image URL")
        return None
    own = "" if python is None else _python(python)
    is_late = any(is_within(own, target) for target in targets)
    return ImageOptions(
        _url(url, absolute),
        name or "",
        _writable(writable, absolute),
        tuple(_bind(text, absolute) for text in binds),
        PYTHONS if is_late or not own else (own,),
        dict(_variable(text) for text in environ),
        own if is_late else "",
    )


def _url(url: str, absolute: Callable[[str], str]) -> str:
    if not url or "\0" in url or "\n" in url:
        raise UsageError(f"--image {url!r}: give a path or a URL, as in hdfs://namenode/images/train")
    if url.startswith(ROOTFS):
        if url == ROOTFS:
            raise UsageError("--image rootfs: names no directory; give one, as in rootfs:/srv/debian12")
        return ROOTFS + absolute(url.removeprefix(ROOTFS))
    if url.startswith("docker://"):
        raise UsageError(f"--image {url}: not a tree; make one with `bootseer image build {url} URL`")
    return url if "://" in url or "::" in url else absolute(url)


def _writable(text: str, absolute: Callable[[str], str]) -> str:
    if text in ("tmpfs", "none"):
        return text
    if not text or "\0" in text:
        raise UsageError(f"--image-writable {text!r}: give tmpfs, none or a directory")
    return absolute(text)


def _bind(text: str, absolute: Callable[[str], str]) -> Bind | UnboundPath:
    found = parse_bind(text)
    return found._replace(source=absolute(found.source)) if isinstance(found, Bind) else found


def _python(text: str) -> str:
    if not text or ("/" in text and not text.startswith("/")) or "\0" in text:
        raise UsageError(f"--image-python {text!r}: give a path in the image, or a name on its PATH")
    return text


def _variable(text: str) -> tuple[str, str]:
    name, value = parse_variable(text)
    if name in RANK_VARIABLES:
        raise UsageError(f"--image-env {text!r}: bootrun sets {name} in each rank")
    return name, value
