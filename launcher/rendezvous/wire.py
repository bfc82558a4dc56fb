"""PURE: one end of a connection between a node and the coordinator. In: bytes. Out: events and bytes.

    preamble   "BOOTSEER", u16 protocol, u8 length and text of the package version: never changes, so that two
               versions can always identify each other; the member sends first
    hello      u8 flags (1: has a secret), 32 bytes nonce; both sides
    proof      with a secret: HMAC of all bytes so far, the member's first; the coordinator sends a verdict byte
               and, if the proof is right, its own proof
    frames     u32 length of the payload, u8 type tag, payload (codec.py); with a secret followed by HMAC-SHA256
               over a counter and the frame, with a key of its own for each direction and each connection

The secret is used only as a key of HMACs. A wrong proof ends the connection and reveals nothing but "wrong".
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import Enum
from typing import NamedTuple

from launcher.rendezvous import codec
from launcher.rendezvous.codec import CodecError, Message

PROTOCOL = 8
MAGIC = b"BOOTSEER"
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_VERSION_BYTES = 64
_PREAMBLE = struct.Struct(">8sHB")
_HEADER = struct.Struct(">IB")
_COUNTER = struct.Struct(">Q")
_HELLO_BYTES = 1 + NONCE_BYTES
_FLAG_SECRET = 1
_VERDICT_GOOD = b"\x01"
_VERDICT_WRONG_SECRET = b"\x02"
_SAME_SECRET = "give all nodes the same (BOOTSEER_SECRET_FILE)"  # noqa: S105


class Trouble(Enum):
    """The reason why a connection cannot continue."""

    FOREIGN = "foreign"  # the other side is another program
    VERSION = "version"
    SECRET = "secret"  # noqa: S105
    BROKEN = "broken"  # the received data is damaged, forged or invalid
    CUT = "cut"  # the connection ended before the handshake


class Reply(NamedTuple):
    """Bytes of the handshake to send now."""

    data: bytes


class Established(NamedTuple):
    """The handshake has succeeded; frames may be sent."""


class Broken(NamedTuple):
    """The last event: close the connection after the replies have been sent."""

    trouble: Trouble
    reason: str


Event = Reply | Established | Broken | Message


class _State(Enum):
    PREAMBLE = 0
    HELLO = 1
    PROOF = 2  # coordinator: waits for the member's
    VERDICT = 3  # member: waits for the coordinator's
    OPEN = 4
    DEAD = 5


class Wire:
    """See the module's docstring. Slots, because a coordinator holds thousands of them."""

    __slots__ = (
        "_accepts",
        "_count_in",
        "_count_out",
        "_is_coordinator",
        "_key_in",
        "_key_out",
        "_received",
        "_rest",
        "_secret",
        "_sent",
        "_state",
        "_version",
        "peer_version",
    )

    def __init__(self, is_coordinator: bool, secret: bytes | None, version: str, nonce: bytes) -> None:
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        self._is_coordinator = is_coordinator
        self._accepts = codec.FROM_MEMBER if is_coordinator else codec.FROM_COORDINATOR
        self._secret = secret
        self._version = version
        self._state = _State.PREAMBLE
        self._rest: bytearray | None = None  # received data that is not complete yet
        self._received = b""  # the handshake's bytes of the two sides
        self._sent = _preamble(version) + bytes([_FLAG_SECRET if secret else 0]) + nonce
        self._key_in = self._key_out = b""  # b"": frames carry no MAC
        self._count_in = self._count_out = 0
        self.peer_version = ""

    def greeting(self) -> bytes:
        """Return the bytes that the member sends after connecting."""
        return self._sent

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and no error has happened since."""
        return self._state is _State.OPEN

    # ---- out -------------------------------------------------------------------------------------------------

    def pack(self, message: Message) -> bytes:
        """Return the frame of a message; frames must be sent in the order in which they were made."""
        return self.pack_encoded(*codec.encode(message))

    def pack_encoded(self, tag: int, payload: bytes) -> bytes:
        """Return the frame of an encoded message (one to many nodes)."""
        head, mac = self.pack_around(tag, payload)
        return head + payload + mac

    def pack_around(self, tag: int, payload: bytes) -> tuple[bytes, bytes]:
        """Return the parts of a frame before and after its payload, for large payloads shared by many nodes."""
        head = _HEADER.pack(len(payload), tag)
        if not self._key_out:
            return head, b""
        mac = hmac.digest(self._key_out, _COUNTER.pack(self._count_out) + head + payload, "sha256")
        self._count_out += 1
        return head, mac

    # ---- in --------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Process received bytes into events; the split of the stream makes no difference."""
        if self._is_dead():
            return []
        buffer: bytes | bytearray = data
        if self._rest is not None:
            self._rest += data
            buffer = self._rest
        events: list[Event] = []
        at = 0
        while at < len(buffer) and (used := self._step(buffer, at, events)) > 0:
            at += used
        if self._is_dead() or at == len(buffer):
            self._rest = None
        elif self._rest is None:
            self._rest = bytearray(buffer[at:])
        elif at:
            del self._rest[:at]
        return events

    def end(self) -> list[Event]:
        """Process the end of the stream from the other side."""
        events: list[Event] = []
        if self._is_dead():
            return events
        if self._state is _State.OPEN:
            where = " in the middle of a message" if self._rest else ""
            self._break(events, Trouble.BROKEN if self._rest else Trouble.CUT, f"closed the connection{where}")
        elif self._rest and self._state is _State.PREAMBLE:
            self._break(events, Trouble.FOREIGN, describe_foreign(bytes(self._rest)))
        else:
            self._break(events, Trouble.CUT, "closed the connection before the handshake was done")
        self._rest = None
        return events

    def _step(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        """Process the next item of the stream; return its length, 0 if it is not complete."""
        if self._state is _State.OPEN:
            return self._read_frame(buffer, at, events)
        match self._state:
            case _State.PREAMBLE:
                return self._read_preamble(buffer, at, events)
            case _State.HELLO:
                return self._read_hello(buffer, at, events)
            case _State.PROOF:
                return self._read_proof(buffer, at, events)
            case _State.VERDICT:
                return self._read_verdict(buffer, at, events)
            case _:
                return 0

    def _is_dead(self) -> bool:
        return self._state is _State.DEAD

    def _break(self, events: list[Event], trouble: Trouble, reason: str) -> int:
        self._state = _State.DEAD
        events.append(Broken(trouble, reason))
        return 0

    # ---- handshake -------------------------------------------------------------------------------------------

    def _read_preamble(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        # Only complete preambles are judged: a different split of the bytes must not change the reason.
        if len(buffer) - at < _PREAMBLE.size:
            return 0
        magic, protocol, length = _PREAMBLE.unpack_from(buffer, at)
        if magic != MAGIC:
            return self._break(events, Trouble.FOREIGN, describe_foreign(bytes(buffer[at : at + _PREAMBLE.size])))
        if length > MAX_VERSION_BYTES:
            return self._break(events, Trouble.BROKEN, "sent a version text of impossible length")
        used: int = _PREAMBLE.size + length
        if len(buffer) - at < used:
            return 0
        raw = bytes(buffer[at : at + used])
        self.peer_version = "".join(
            c if 32 < ord(c) < 127 else "?" for c in raw[_PREAMBLE.size :].decode("latin-1")
        )
        if protocol != PROTOCOL:
            if self._is_coordinator:
                events.append(Reply(_preamble(self._version)))
            return self._break(
                events,
                Trouble.VERSION,
                f"runs bootseer {self.peer_version} (protocol {protocol}), this node {self._version} "
                f"(protocol {PROTOCOL}): install the same version on all nodes",
            )
        self._received = raw
        self._state = _State.HELLO
        return used

    def _read_hello(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        if len(buffer) - at < _HELLO_BYTES:
            return 0
        raw = bytes(buffer[at : at + _HELLO_BYTES])
        self._received += raw
        if self._is_coordinator:
            events.append(Reply(self._sent))
        if raw[0] & ~_FLAG_SECRET:
            return self._break(events, Trouble.BROKEN, "sent a handshake with unknown flags")
        has_secret = bool(raw[0] & _FLAG_SECRET)
        if has_secret != bool(self._secret):
            who = "has a secret, this node has none" if has_secret else "has no secret, this node has one"
            return self._break(events, Trouble.SECRET, f"{who}: {_SAME_SECRET}")
        if self._secret is None:
            self._open(events)
        elif self._is_coordinator:
            self._state = _State.PROOF
        else:
            events.append(Reply(self._hmac(b"member's proof")))
            self._state = _State.VERDICT
        return _HELLO_BYTES

    def _read_proof(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        if len(buffer) - at < MAC_BYTES:
            return 0
        if not hmac.compare_digest(bytes(buffer[at : at + MAC_BYTES]), self._hmac(b"member's proof")):
            events.append(Reply(_VERDICT_WRONG_SECRET))
            return self._break(events, Trouble.SECRET, f"has another secret than this node: {_SAME_SECRET}")
        events.append(Reply(_VERDICT_GOOD + self._hmac(b"coordinator's proof")))
        self._open(events)
        return MAC_BYTES

    def _read_verdict(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        if buffer[at : at + 1] == _VERDICT_WRONG_SECRET:
            return self._break(events, Trouble.SECRET, f"has another secret than this node: {_SAME_SECRET}")
        used = 1 + MAC_BYTES
        if len(buffer) - at < used:
            return 0
        raw = bytes(buffer[at : at + used])
        if not hmac.compare_digest(raw, _VERDICT_GOOD + self._hmac(b"coordinator's proof")):
            return self._break(events, Trouble.SECRET, "does not know the secret of this job")
        self._open(events)
        return used

    def _open(self, events: list[Event]) -> None:
        if self._secret is not None:
            keys = self._hmac(b"frames of the member"), self._hmac(b"frames of the coordinator")
            self._key_in, self._key_out = keys if self._is_coordinator else keys[::-1]
        self._secret, self._sent, self._received = None, b"", b""
        self._state = _State.OPEN
        events.append(Established())

    def _hmac(self, purpose: bytes) -> bytes:
        """Return an HMAC under the secret, bound to every byte of both hellos."""
        both = (self._received, self._sent) if self._is_coordinator else (self._sent, self._received)
        transcript = hashlib.sha256(struct.pack(">I", len(both[0])) + both[0] + both[1]).digest()
        return hmac.digest(self._secret or b"", b"bootseer 1: " + purpose + b"\0" + transcript, "sha256")

    # ---- frames ----------------------------------------------------------------------------------------------

    def _read_frame(self, buffer: bytes | bytearray, at: int, events: list[Event]) -> int:
        there = len(buffer) - at
        if there < _HEADER.size:
            return 0
        length: int
        length, tag = _HEADER.unpack_from(buffer, at)
        kind = self._accepts.get(tag)
        # Checked before the MAC: no client may make this side wait for more bytes than the message can have.
        if kind is None:
            return self._break(events, Trouble.BROKEN, f"sent a message of unknown type {tag}")
        if length > kind.max_bytes:
            return self._break(
                events,
                Trouble.BROKEN,
                f"sent a {kind.type.__name__} message of {length} bytes ({kind.max_bytes} at most)",
            )
        end = _HEADER.size + length
        used = end + MAC_BYTES if self._key_in else end
        if there < used:
            return 0
        if self._key_in:
            signed = _COUNTER.pack(self._count_in) + buffer[at : at + end]
            mac = hmac.digest(self._key_in, signed, "sha256")
            if not hmac.compare_digest(mac, buffer[at + end : at + used]):
                return self._break(
                    events, Trouble.BROKEN, "sent a message that was altered, repeated or left out in transit"
                )
            self._count_in += 1
        try:
            events.append(codec.decode(kind, buffer[at + _HEADER.size : at + end]))
        except CodecError as error:
            return self._break(events, Trouble.BROKEN, f"sent {error}")
        return used


def _preamble(version: str) -> bytes:
    text = version.encode("ascii", "replace")[:MAX_VERSION_BYTES]
    return _PREAMBLE.pack(MAGIC, PROTOCOL, len(text)) + text


_HTTP = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"CONNECT ", b"PATCH ", b"PRI * ")


def describe_foreign(data: bytes) -> str:
    """Describe the program at the other side by its first bytes."""
    if data.startswith(_HTTP):
        return "sent an HTTP request"
    if data.startswith(b"HTTP/"):
        return "answered in HTTP: it is a web server"
    if data.startswith((b"\x16\x03", b"\x15\x03")):
        return "speaks TLS"
    if data.startswith(b"SSH-"):
        return "speaks SSH"
    if data[:5] in (b"\x00\xce\xf7\x85\x3c", b"\x00\x3c\x85\xf7\xce"):
        return "is a torch TCPStore client (torchrun or a rank)"
    return f"does not speak bootrun's protocol (it began with {data[:8]!r})"
