"""Warms one job file: `python -P -m launcher.warm.worker`, started by the daemon (daemon.py), a process for each.

One order on its standard input, a line of JSON: name, text, owner (None: as it is), only, most_bytes,
most_bytes_per_s, hold_s. Answers on its standard output, JSON lines: said text; progress stage done total;
will-hold digest (a line on its input says that it may, as nobody holds another version any more); at the end done
stages holds, or failed why; with `holds` it lives on until a job has taken the checkpoint, or its time is over.
What is the user's (paths, interpreters, stores, links) is looked at only after this process has become that user.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from typing import Any

from bootseer.errors import BootseerError, UsageError
from bootseer.mounts.namespaces import die_with_parent
from launcher.warm.jobs import become, environ_of, parse_job
from launcher.warm.results import described, to_record

PROGRESS_EVERY_BYTES = 16 << 20


def main() -> int:
    """The exit status: 0 when it has said how it ended."""
    order = json.loads(sys.stdin.readline())
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print

    def tell(did: str, **fields: object) -> None:
        data = json.dumps({"did": did, **fields}).encode("ascii") + b"\n"
        try:
            while data:
                data = data[os.write(answers, data) :]
        except BrokenPipeError:
            os._exit(0)  # the daemon has ended, and nobody wants to know

    try:
        _work(order, tell)
    except (BootseerError, OSError) as error:
        tell("failed", why=described(error))
    return 0


def _work(order: dict[str, Any], tell: Any) -> None:
    job = parse_job(order["text"].encode("utf-8", "surrogateescape"), order["name"])
    owner = order["owner"]
    if owner is not None:
        environ = environ_of(owner, os.geteuid(), os.environ, job.python)
        become(owner)
        os.environ.clear()
        os.environ.update(environ)
    elif job.python:
        os.environ["PYTHON_EXEC"] = job.python
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # its session is its own
    die_with_parent(signal.SIGTERM)  # not before: another user is another beginning to the kernel
    os.chdir(job.folder or os.environ.get("HOME") or "/")
    from bootseer.priority import lower
    from launcher.config_file import fill
    from launcher.spec import build_spec
    from launcher.warm.noted import note
    from launcher.warm.options import parse
    from launcher.warm.stages import Limit, Warmer

    lower()  # a job that runs on this node goes before
    try:
        _, args = parse(job.command, os.environ)
    except SystemExit as ended:  # argparse has said why
        raise UsageError(f"{order['name']}: [job] command: is no command line of bootrun") from ended
    args.config = os.devnull  # this file is its settings; one that lies in the folder is for bootrun
    fill(args, job.settings, os.environ)
    spec = build_spec(args, os.environ)
    told = {"": 0}

    def progress(stage: str, done: int, total: int) -> None:
        if done - told.get(stage, -PROGRESS_EVERY_BYTES) >= PROGRESS_EVERY_BYTES or done >= total:
            told[stage] = done
            tell("progress", stage=stage, done=done, total=total)

    limit = Limit(order["most_bytes"], order["most_bytes_per_s"], order["hold_s"])

    def will_hold(digest: str) -> None:
        tell("will-hold", digest=digest)
        sys.stdin.readline()

    warmer = Warmer(spec, limit, lambda text: tell("said", text=text), progress, will_hold)
    with closing(warmer):
        found = warmer.run(tuple(order["only"]))
        note(found, os.environ)
        tell("done", stages=[to_record(each) for each in found], holds=warmer.is_holding)
        warmer.hold()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads of libraries are not waited for
