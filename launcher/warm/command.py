"""`bootseer warm`: warms one job, once, or (--jobs) the jobs of a directory until it is ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from bootseer.cli.node_arena import until_signal
from bootseer.cli.progress import ProgressLine
from bootseer.errors import BootseerError, UsageError
from launcher.warm.options import Options, is_named, parse
from launcher.warm.results import Warmed, exit_status, line, to_record

if TYPE_CHECKING:
    import argparse

    from launcher.spec import LaunchSpec

NAME = "bootseer warm"


def main(argv: Sequence[str]) -> int:
    """Run `bootseer warm`. Returns: the exit status."""
    try:
        options, args = parse(argv, os.environ)
        if options.shows_status:
            return _status(options)
        if options.jobs:
            return _daemon(options, args.quiet)
        return _once(options, args)
    except BootseerError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _once(options: Options, args: argparse.Namespace) -> int:
    from bootseer.logs import sent_to
    from launcher.spec import build_spec
    from launcher.warm.stages import Warmer, WarmLimits, stages_of
    from launcher.warm.warm_record import write

    spec = build_spec(args, os.environ)
    os.environ.update(spec.tuning)  # helper processes inherit it
    if not stages_of(spec):
        raise UsageError(
            "this job has nothing to warm: name an image (--image), set-up (--setup and --env-store),"
            " compile caches (--keep-caches) or a checkpoint (--load-checkpoint), here or in bootseer.toml"
        )
    limit = WarmLimits(options.max_bytes, options.max_bytes_per_s, options.hold_s)
    say = _quiet if args.quiet else _say
    with _Progress(args.quiet, options.as_json) as progress, sent_to(say):
        warmer = Warmer(spec, limit, say, progress)
        with closing(warmer):
            found = warmer.run(options.only)
            write(found, os.environ)
            _show(spec, options, found)
            if warmer.is_holding:
                say(f"holding the checkpoint in memory, for {options.hold_s:g} s or until a job takes it")
                with until_signal():
                    say("a job has taken the checkpoint" if warmer.hold() else "no job has taken the checkpoint")
    return exit_status(found)


def _show(spec: LaunchSpec, options: Options, found: Sequence[Warmed]) -> None:
    if options.as_json:
        script = spec.entry.target if is_named(spec.entry.target) else ""
        print(json.dumps({"script": script, "stages": [to_record(each) for each in found]}), flush=True)
        return
    for each in found:
        print(line(each), flush=True)


def _daemon(options: Options, is_quiet: bool) -> int:
    from launcher.warm.daemon import Daemon

    with _Progress(is_quiet, options.as_json) as progress:
        return Daemon(options, _say, progress).run()


def _status(options: Options) -> int:
    from launcher.warm.daemon import read_status
    from launcher.warm.rounds import status_lines

    record = read_status()
    print(json.dumps(record) if options.as_json else "\n".join(status_lines(record, time.time())))
    return 0


class _Progress:
    """The progress line of the current stage."""

    def __init__(self, is_quiet: bool, as_json: bool) -> None:
        self._is_quiet, self._as_json = is_quiet, as_json
        self._stage = ""
        self._line: ProgressLine | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._line is None or stage != self._stage:
            self.__exit__()
            self._stage = stage
            line = ProgressLine(f"{NAME}: {stage}", is_quiet=self._is_quiet, as_json=self._as_json)
            self._line = line.__enter__()
        self._line(done, total)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.__exit__(None, None, None)
            self._line = None


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def _quiet(_: str) -> None:
    """Print nothing, for --quiet."""
