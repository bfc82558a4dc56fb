"""Orders to helper processes and their answers: in order, whole, and never half understood."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.ipc.framing import InvalidMessageError, LineBuffer
from launcher.base.json_lines import NOT_UNDERSTOOD, JsonLines
from launcher.base.loop import Loop


class Bed:
    """A connection, its other end, and what came of it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.answers: list[dict[str, Any]] = []
        self.ends: list[str] = []
        self.lines = JsonLines(self.loop, self.take, self.end, self.check)
        self.ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(10.0)
        self.stops_after = 0

    def check(self, answer: dict[str, Any]) -> None:
        if "bad" in answer:
            raise InvalidMessageError

    def take(self, answer: dict[str, Any]) -> None:
        self.answers.append(answer)
        if len(self.answers) == self.stops_after:
            self.loop.stop()

    def end(self, why: str) -> None:
        self.ends.append(why)
        self.loop.stop()

    def run(self, answers: int = 0) -> None:
        """Until the end, or until so many have come."""
        self.stops_after = answers
        timer = self.loop.call_later(10.0, self.end, "nothing came")
        self.loop.run_forever()
        timer.cancel()

    def close(self) -> None:
        self.lines.close()
        self.theirs.close()
        self.ours.close()
        self.loop.close()


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.close()


def test_an_answer_that_the_check_refuses_ends_the_connection(bed: Bed) -> None:
    bed.lines.open(bed.ours)
    bed.theirs.sendall(b'{"did":"one"}\n{"bad":1}\n{"did":"two"}\n')
    bed.run()
    assert (bed.answers, bed.ends) == ([{"did": "one"}], [NOT_UNDERSTOOD])
    assert bed.theirs.recv(1) == b""


def test_answers_come_in_order_however_they_are_cut(bed: Bed) -> None:
    bed.lines.open(bed.ours)
    wanted = [{"did": "said", "text": "\u00e9\n" * number} for number in range(50)]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in wanted)
    chance = random.Random(1)

    def send() -> None:
        nonlocal data
        count = chance.randrange(1, 300)
        bed.theirs.sendall(data[:count])
        data = data[count:]
        if data:
            bed.loop.call_later(0.0, send)

    send()
    bed.run(answers=50)
    assert bed.answers == wanted and not bed.ends


def test_what_is_asked_before_is_sent_when_it_comes(bed: Bed) -> None:
    bed.lines.ask("start", number=1)
    assert not bed.lines.is_open
    bed.lines.open(bed.ours)
    bed.lines.ask("load")
    assert bed.lines.is_open
    assert bed.theirs.recv(1000) == b'{"do": "start", "number": 1}\n{"do": "load"}\n'


def test_an_order_that_does_not_fit_is_sent_on(bed: Bed) -> None:
    bed.lines.open(bed.ours)
    text = "x" * (4 << 20)
    bed.lines.ask("show", text=text)
    received = bytearray()

    def read() -> None:
        received.extend(bed.theirs.recv(1 << 16))
        if received.endswith(b"\n"):
            bed.theirs.sendall(b'{"did": "shown"}\n')

    bed.loop.add_reader(bed.theirs.fileno(), read)
    bed.run(answers=1)
    bed.loop.remove_reader(bed.theirs.fileno())
    assert json.loads(received) == {"do": "show", "text": text}


@pytest.mark.parametrize(
    "said", [b"nonsense\n", b"[1]\n", b"\xff\n", b"\n", b"1" * 5000 + b"\n", b"[" * 100_000 + b"\n"]
)
def test_nonsense_is_the_end(bed: Bed, said: bytes) -> None:
    bed.lines.open(bed.ours)
    bed.theirs.sendall(b'{"did": "one"}\n' + said + b'{"did": "two"}\n')
    bed.run()
    assert (bed.answers, bed.ends) == ([{"did": "one"}], [NOT_UNDERSTOOD])
    assert not bed.lines.is_open
    assert bed.ours.fileno() == -1
    bed.lines.ask("more")  # is lost


def test_a_line_without_an_end_is_the_end(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.lines, "_incoming", LineBuffer(1000))
    bed.lines.open(bed.ours)
    bed.theirs.sendall(b"{" * 1001)
    bed.run()
    assert bed.ends == [NOT_UNDERSTOOD]


def test_the_other_end_is_gone(bed: Bed) -> None:
    bed.lines.open(bed.ours)
    bed.theirs.sendall(b'{"did": "one"}\n{"did": "ha')
    bed.theirs.close()
    bed.run()
    assert (bed.answers, bed.ends) == ([{"did": "one"}], ["it closed its connection"])


def test_after_the_end_nothing_is_reported(bed: Bed) -> None:
    """Also of what came in one piece with the answer that led to the end."""
    found = JsonLines(bed.loop, lambda answer: (bed.take(answer), found.close(), bed.loop.stop()), bed.end)
    found.open(bed.ours)
    bed.theirs.sendall(b'{"did": "one"}\n{"did": "two"}\n')
    bed.run()
    found.close()
    assert (bed.answers, bed.ends) == ([{"did": "one"}], [])
