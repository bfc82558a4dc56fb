"""PURE: the needs of a container with the node's accelerators, from the node's CDI specifications.

In: specifications as parsed JSON or YAML, in the order of their files. Out: variables, binds and links. Device
nodes need nothing, as /dev is the node's own. Hooks are programs of the node that would run with this process's
rights: none is run. Bootseer itself does the work of two of NVIDIA's: links, and names for bound libraries.

Source: github.com/cncf-tags/container-device-interface, SPEC.md 0.3 to 1.0; nvidia-ctk cdi generate.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.mounts.sandbox.binds import KERNEL_DIRECTORIES, OWN_DIRECTORY, Bind, is_within, normalize

KIND = "nvidia.com/gpu"
EVERY = "all"
MAX_ITEMS = 10_000  # of any list
MAX_PATH_CHARS = 4096
_LINK_HOOK, _LIBRARY_HOOK = "create-symlinks", "update-ldcache"


class DeviceEdits(NamedTuple):
    """The needs of a node's accelerators inside an image."""

    names: tuple[str, ...] = ()  # chosen devices of the specification, "all" or numbers
    environ: Mapping[str, str] = {}
    binds: tuple[Bind, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # (target, path of the link), inside
    notes: tuple[str, ...] = ()  # lines for users: what was left out


class _Collected:
    """Edits in the order of discovery, each once."""

    def __init__(self) -> None:
        self.environ: dict[str, str] = {}
        self.binds: dict[str, Bind] = {}
        self.links: dict[str, str] = {}
        self.notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        self.notes[text] = None


def find_devices(specs: Iterable[tuple[str, Any]]) -> DeviceEdits:
    """Return all accelerators that the specifications (each with its file's path) name."""
    found = _Collected()
    names: dict[str, None] = {}
    for path, spec in specs:
        if not isinstance(spec, Mapping) or spec.get("kind") != KIND:
            continue
        try:
            chosen = _choose(spec)
            for name, edits in chosen:
                names[name] = None
                _collect(found, edits)
            if chosen:
                _collect(found, spec.get("containerEdits") or {})
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            found.note(f"{path}: is not a usable CDI specification: {error}")
    return DeviceEdits(
        tuple(names),
        found.environ,
        tuple(found.binds.values()),
        tuple((text, place) for place, text in found.links.items()),
        tuple(found.notes),
    )


def _choose(spec: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the device that stands for all, or each of them; a rank selects by CUDA_VISIBLE_DEVICES."""
    devices = [(_text(each["name"]), each.get("containerEdits") or {}) for each in _list(spec.get("devices"))]
    return [each for each in devices if each[0] == EVERY] or devices


def _collect(found: _Collected, edits: Mapping[str, Any]) -> None:
    for each in _list(edits.get("env")):
        name, equals, value = _text(each).partition("=")
        if not equals or not name:
            raise ValueError(f"{each!r} is no variable")
        found.environ[name] = value
    for each in _list(edits.get("deviceNodes")):
        place = _path(each["path"])
        if normalize(_path(each.get("hostPath") or place)) != place:
            found.note(f"CDI: the device {place} has another name on this node ({each['hostPath']}): left out")
    for each in _list(edits.get("mounts")):
        _collect_mount(found, each)
    for each in _list(edits.get("hooks")):
        _collect_hook(found, each)


def _collect_mount(found: _Collected, mount: Mapping[str, Any]) -> None:
    place = _path(mount["containerPath"])
    if place == "/" or any(is_within(place, directory) for directory in (*KERNEL_DIRECTORIES, OWN_DIRECTORY)):
        found.note(f"CDI: nothing is mounted at {place}: left out")
        return
    options = [_text(each) for each in _list(mount.get("options"))]
    found.binds[place] = Bind(_path(mount["hostPath"]), place, is_read_only="rw" not in options, is_optional=True)


def _collect_hook(found: _Collected, hook: Mapping[str, Any]) -> None:
    words = [_text(each) for each in _list(hook.get("args"))]
    if _LINK_HOOK in words:
        for value in _values(words, "--link"):
            text, separator, place = value.partition("::")
            if not separator or not text:
                raise ValueError(f"{value!r} is no link")
            found.links[_path(place)] = text
    elif _LIBRARY_HOOK in words:
        found.note(f"CDI: the hook {_LIBRARY_HOOK} is not run: LD_LIBRARY_PATH names the driver's libraries")
    else:
        name = next((word for word in words[1:] if not word.startswith("-")), "") or _text(hook.get("path") or "?")
        verb = next((word for word in words[2:] if not word.startswith("-")), "") if name == "hook" else ""
        found.note(f"CDI: the hook {verb or name} is not run")


def _values(words: Sequence[str], flag: str) -> Iterable[str]:
    """Yield the values of `--flag value` and `--flag=value`."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == flag:
            yield after
        elif word.startswith(flag + "="):
            yield word.removeprefix(flag + "=")


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ValueError(f"a list of at most {MAX_ITEMS} is expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or "\n" in value:
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _path(value: Any) -> str:
    text = _text(value)
    if not text.startswith("/") or len(text) > MAX_PATH_CHARS or ".." in text.split("/"):
        raise ValueError(f"{text[:80]!r} is no absolute path")
    return posixpath.normpath("/" + text.lstrip("/"))
