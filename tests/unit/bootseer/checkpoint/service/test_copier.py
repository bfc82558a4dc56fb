"""The service's side of the process that copies a checkpoint to the disk: what bootrun and commands get."""

from __future__ import annotations

import selectors
import socket
import subprocess
from collections.abc import Iterator
from typing import Any, cast

import pytest

from bootseer.checkpoint.service.copier import NOT_KEPT, Copier
from bootseer.checkpoint.service.process import WRITER_DIED, Answers, Child
from bootseer.ipc.channel import Channel
from bootseer.ipc.framing import encode
from bootseer.logs import sent_to


class Bed:
    """A copier whose process is the test's: `theirs` is its end of the connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.kept: list[bool] = []
        ours, self.theirs = socket.socketpair()
        self.process = subprocess.Popen(["sleep", "60"])
        self.process.returncode = 0  # the copier waits for it
        self.selector = selectors.DefaultSelector()
        self.answers = answers = Answers(cast(Channel, self))
        child = Child(self.process.pid, Channel(ours))
        self.copier = Copier(self.selector, lambda _work: child, answers, lambda: self.kept.append(True))
        self.copier.start(cast(Any, None), cast(Any, None), 1, set())

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def hear(self) -> None:
        """Handle all that the process sends until it has ended."""
        while self.copier.is_running:
            for key, _ in self.selector.select(10):
                key.data()


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    with sent_to(made.answers.say):
        yield made
    made.copier.stop()
    made.theirs.close()
    made.selector.close()


@pytest.mark.parametrize("progress", [[], [{"bytes": 1, "of_bytes": 2}]])
def test_a_process_that_dies_is_an_answer(bed: Bed, progress: list[dict[str, object]]) -> None:
    """A user's command waits for it."""
    for news in progress:
        bed.theirs.sendall(encode(news))
    bed.theirs.close()
    bed.hear()
    assert bed.kept == []
    assert bed.sent[len(progress) :] == [
        {"did": "said", "text": f"{NOT_KEPT}: {WRITER_DIED}"},
        {"did": "copied", "why": WRITER_DIED},
    ]


@pytest.mark.parametrize("why", ["", "the disk is nearly full"])
def test_a_process_that_ends_has_one_answer(bed: Bed, why: str) -> None:
    bed.theirs.sendall(encode({"copied": why}))
    bed.theirs.close()
    bed.hear()
    assert bed.kept == ([] if why else [True])
    said = [{"did": "said", "text": f"{NOT_KEPT}: {why}"}] if why else []
    assert bed.sent == [*said, {"did": "copied", "why": why}]
