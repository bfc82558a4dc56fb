"""PURE: JSON objects, one a line. Imports json only when a message is encoded or decoded, for the launch path."""

from __future__ import annotations

from bootseer.light_typing import Any


class InvalidMessageError(ValueError):
    """A line is too long, is no JSON, or holds no object."""


class LineBuffer:
    """Cuts received bytes into lines of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends. Raises: InvalidMessageError."""
        first, end, more = data.partition(b"\n")
        self._rest += first
        if len(self._rest) > self._max_bytes:
            raise InvalidMessageError(f"a message of more than {self._max_bytes} bytes")
        if not end:
            return []
        *lines, rest = more.split(b"\n")
        found = [bytes(self._rest), *lines]
        self._rest = bytearray(rest)
        return found


def encode(message: object) -> bytes:
    import json

    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the object of a line. Raises: InvalidMessageError."""
    import json

    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidMessageError("a message that is no JSON") from error
    if not isinstance(found, dict):
        raise InvalidMessageError("a message that is no JSON object")
    return found
