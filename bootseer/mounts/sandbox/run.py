"""Runs one program inside an image and waits for it: `bootseer image run` and `record`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import ConfigError
from bootseer.logs import get_logger
from bootseer.mounts.sandbox.image_root import ImageRequest, open_image
from bootseer.mounts.sandbox.process import ImageSandbox

_log = get_logger(__name__)

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends them to the program as well.
IGNORED = (signal.SIGINT, signal.SIGQUIT)


class RunResult(NamedTuple):
    """A program that has ended."""

    status: int  # as a shell shows it: 128 + n for signal n
    figures: Mapping[str, float]  # bytes that it read of its image, and its stall time


def run_in_image(request: ImageRequest, argv: Sequence[str], *, is_whole_start: bool = False) -> RunResult:
    """Run `argv` in the image, with this process's streams, environment and working directory.

    Call it in a process without threads; it forks. Signals that end programs are passed on.

    Args: is_whole_start: record all reads of the program until its end, even if a trace is known already.
    Raises: ConfigError, StorageError, IntegrityError.
    """
    if not argv:
        raise ConfigError("no program is given: name one to run in the image")
    sandbox = ImageSandbox()
    try:
        image = open_image(request, sandbox)
    except BaseException:
        sandbox.close()
        raise
    try:
        for note in image.notes:
            _log.line(note)
        image.show_status_folder()
        status = _run([*image.prefix, *argv], image.environ(os.environ))
        figures = image.source.first_step() if is_whole_start else {}
    finally:
        image.close()
    return RunResult(status, figures)


def _run(argv: list[str], environ: Mapping[str, str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    waiting: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if child is None:
            waiting.append(number)
        elif child.returncode is None:
            os.kill(child.pid, number)  # it has not been waited for, so the pid is its own

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    # Not SIG_IGN, which the program would inherit.
    before |= {number: signal.signal(number, lambda _number, _frame: None) for number in IGNORED}
    try:
        child = subprocess.Popen(argv, env=dict(environ), restore_signals=True)
        for number in waiting:
            forward(number, None)
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
