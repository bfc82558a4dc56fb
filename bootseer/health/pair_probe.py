"""Network measurement between two nodes: latency, then both send at once, over one TCP connection.

Both prove that they know the key of the test (bootseer/peers/auth.py); only random numbers and zeros are sent.
Each side sends at most MAX_BYTES, for at most SEND_S, and ends by its deadline. The receiver counts received
bytes, and the sender's kernel counts lost segments (tcp(7), TCP_INFO).
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import time
from contextlib import suppress

from bootseer.health.pairs import PairMeasurement
from bootseer.peers.auth import NONCE_BYTES, Handshake

MAGIC = b"BSPAIR1\0"
SEND_S = 0.25
MAX_BYTES = 16 << 20
_PINGS, _PING_BYTES, _PINGS_S = 20, 16, 0.15
_CHUNK_BYTES = 256 << 10
_WINDOW_BYTES, _MIN_WINDOWS = 1 << 20, 4
_QUEUE_BYTES = 512 << 10  # of the send queue: a longer one would keep a slow path busy long after the test
_HELLO = struct.Struct(f"!8sI{NONCE_BYTES}s")
_PROOF_BYTES = 64
# Of struct tcp_info (linux/tcp.h): tcpi_total_retrans, and tcpi_data_segs_out of Linux 4.6.
_RETRANSMITTED_AT, _SEGMENTS_AT, _INFO_BYTES = 100, 156, 232


class NotProvenError(Exception):
    """The other side is not a node of this test."""


def connect(address: str, port: int, own: int, partner: int, key: bytes, end_s: float) -> socket.socket:
    """Connect to a partner and authenticate both sides. Raises: OSError, NotProvenError."""
    sock = socket.create_connection((address, port), max(0.01, end_s - time.monotonic()))
    try:
        _prepare(sock)
        nonce = os.urandom(NONCE_BYTES)
        _send(sock, _HELLO.pack(MAGIC, own, nonce), end_s)
        answer = _receive(sock, NONCE_BYTES + _PROOF_BYTES, end_s)
        greeting = Handshake(str(own), str(partner), nonce, answer[:NONCE_BYTES])
        if not greeting.is_server(key, answer[NONCE_BYTES:].decode("ascii", "replace")):
            raise NotProvenError("it does not know the key of this test")
        _send(sock, greeting.session(key).sign("pair", "", "").encode(), end_s)
    except BaseException:
        sock.close()
        raise
    return sock


def receive_hello(sock: socket.socket, end_s: float) -> tuple[int, bytes]:
    """Receive the number and nonce of a connected node, not yet authenticated. Raises: OSError, NotProvenError."""
    _prepare(sock)
    magic, number, nonce = _HELLO.unpack(_receive(sock, _HELLO.size, end_s))
    if magic != MAGIC:
        raise NotProvenError("it speaks another protocol")
    return number, nonce


def answer(sock: socket.socket, own: int, partner: int, nonce: bytes, key: bytes, end_s: float) -> None:
    """Authenticate a connected partner, after `receive_hello`. Raises: OSError, NotProvenError."""
    mine = os.urandom(NONCE_BYTES)
    greeting = Handshake(str(partner), str(own), nonce, mine)
    _send(sock, mine + greeting.server_proof(key).encode(), end_s)
    proof = _receive(sock, _PROOF_BYTES, end_s).decode("ascii", "replace")
    if not greeting.session(key).is_signed(proof, "pair", "", ""):
        raise NotProvenError("it does not know the key of this test")


def measure(sock: socket.socket, partner: int, is_first: bool, end_s: float) -> PairMeasurement:
    """Measure the path to a partner and close the connection. Args: is_first: this side sends first.

    Raises: OSError if nothing could be measured.
    """
    has_ended = False
    try:
        latency_s = None
        if is_first:
            latency_s = _ask(sock, end_s)
        else:
            _echo(sock, end_s)
        rate, has_ended = _exchange(sock, end_s)
        return PairMeasurement(partner, "", latency_s, rate, _lost_share(sock))
    finally:
        if not has_ended:
            # Unsent data is dropped: the next pair needs the link.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def _ask(sock: socket.socket, end_s: float) -> float | None:
    """Return the median of some round trips; ends with a message that begins with zero."""
    times: list[float] = []
    stop_s = time.monotonic() + _PINGS_S
    while len(times) < _PINGS and (not times or time.monotonic() < stop_s):
        sent_s = time.monotonic()
        _send(sock, b"\1" * _PING_BYTES, end_s)
        _receive(sock, _PING_BYTES, end_s)
        times.append(time.monotonic() - sent_s)
    _send(sock, bytes(_PING_BYTES), end_s)
    _receive(sock, _PING_BYTES, end_s)
    return sorted(times)[len(times) // 2]


def _echo(sock: socket.socket, end_s: float) -> None:
    while True:
        data = _receive(sock, _PING_BYTES, end_s)
        _send(sock, data, end_s)
        if not data[0]:
            return


def _exchange(sock: socket.socket, end_s: float) -> tuple[float, bool]:
    """Send and receive zeros until enough is sent, or the time is over.

    Returns: bytes received per second, and whether all sent data arrived.
    """
    sock.setblocking(False)
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLOUT)
    zeros, buffer = memoryview(bytes(_CHUNK_BYTES)), bytearray(_CHUNK_BYTES)
    began_s = time.monotonic()
    stop_s, give_up_s = min(began_s + SEND_S, end_s), min(began_s + 2 * SEND_S, end_s)
    sent = received = 0
    came: list[tuple[float, int]] = []  # time, and bytes received by then
    last_s = began_s
    is_sending, has_ended = True, False
    while (now_s := time.monotonic()) < give_up_s:
        if is_sending and (sent >= MAX_BYTES or now_s >= stop_s):
            is_sending = False
            with suppress(OSError):  # the other side has given up: received data counts
                sock.shutdown(socket.SHUT_WR)
            poller.modify(sock, select.POLLIN)
        events = poller.poll(max(0.0, 1e3 * ((stop_s if is_sending else give_up_s) - now_s)))
        mask = events[0][1] if events else 0
        if mask & select.POLLIN:
            try:
                count = sock.recv_into(buffer)
            except BlockingIOError:
                continue
            except ConnectionError:
                break
            has_ended = not count
            if has_ended:
                if not is_sending:
                    break
                poller.modify(sock, select.POLLOUT)
            else:
                received += count
                if not came or received - came[-1][1] >= _WINDOW_BYTES:
                    came.append((time.monotonic(), received))
                last_s = time.monotonic()
        elif mask & (select.POLLHUP | select.POLLERR):
            break
        if is_sending and mask & select.POLLOUT:
            try:
                sent += sock.send(zeros[: MAX_BYTES - sent])
            except BlockingIOError:
                pass
            except ConnectionError:
                break
        if has_ended and not is_sending:
            break
    return _rate(came, last_s, received, time.monotonic() - began_s), has_ended


def _rate(came: list[tuple[float, int]], last_s: float, received: int, took_s: float) -> float:
    """Return bytes per second: the median of some windows, as a wait for the CPU affects only a few.

    Args: came: the times at which the first bytes came and each window was full, with the bytes received by then.
    """
    if len(came) > _MIN_WINDOWS:
        rates = [
            (size - before) / max(at_s - from_s, 1e-6)
            for (from_s, before), (at_s, size) in itertools.pairwise(came)
        ]
        return sorted(rates)[len(rates) // 2]
    if not came or received == came[0][1]:  # nothing, or one piece
        return received / max(took_s, 1e-6)
    return (received - came[0][1]) / max(last_s - came[0][0], 1e-6)


def _lost_share(sock: socket.socket) -> float | None:
    """Return the share of sent data segments that were retransmitted."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _SEGMENTS_AT + 4:
        return None
    again, segments = (struct.unpack_from("=I", info, place)[0] for place in (_RETRANSMITTED_AT, _SEGMENTS_AT))
    return float(min(1.0, again / segments)) if segments else None


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)


def _send(sock: socket.socket, data: bytes, end_s: float) -> None:
    sock.settimeout(_left(end_s))
    sock.sendall(data)


def _receive(sock: socket.socket, size: int, end_s: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(end_s))
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


def _left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s
