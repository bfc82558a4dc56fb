"""Warms one job file: `python -P -m launcher.warm.worker`, started by the daemon (daemon.py), a process for each.

In: one order on standard input, a line of JSON: name, text, owner (None: no change), only, max_bytes,
max_bytes_per_s, hold_s. Out: answers on standard output, JSON lines: said text; progress stage done total;
will-hold digest (then it waits for `go`, sent once no process holds another version); at the end
done stages holds, or failed why. With `holds` it runs on until a job takes the checkpoint or its time is over. It
accesses the user's data (paths, interpreters, stores, links) only after it has become that user.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from typing import Any

from bootseer.errors import BootseerError, UsageError
from bootseer.ipc.channel import Channel
from bootseer.linux.processes import set_death_signal
from launcher.warm.jobs import become, environ_of, parse_job
from launcher.warm.results import described, to_record

PROGRESS_EVERY_BYTES = 16 << 20


def main() -> int:
    """Run the worker. Returns: the exit status, 0 if it has sent its result."""
    daemon = Channel.of_streams(0, os.dup(1))
    os.dup2(2, 1)  # for output of libraries
    order = daemon.receive()
    if order is None:
        return 0

    def tell(did: str, **fields: object) -> None:
        daemon.send({"did": did, **fields})
        if daemon.is_broken:
            os._exit(0)  # the daemon has ended

    try:
        _work(order, tell, daemon)
    except (BootseerError, OSError) as error:
        tell("failed", why=described(error))
    return 0


def _work(order: dict[str, Any], tell: Any, daemon: Channel) -> None:
    job = parse_job(order["text"].encode("utf-8", "surrogateescape"), order["name"])
    owner = order["owner"]
    if owner is not None:
        environ = environ_of(owner, os.geteuid(), os.environ, job.python)
        become(owner)
        os.environ.clear()
        os.environ.update(environ)
    elif job.python:
        os.environ["PYTHON_EXEC"] = job.python
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # it has its own session
    set_death_signal(signal.SIGTERM)  # not before: the kernel resets it at a change of user
    os.chdir(job.folder or os.environ.get("HOME") or "/")
    from bootseer.linux.priority import lower
    from bootseer.logs import send_to
    from launcher.cli.config_file import fill
    from launcher.spec import build_spec
    from launcher.warm.options import parse
    from launcher.warm.stages import Warmer, WarmLimits
    from launcher.warm.warm_record import write

    lower()  # a job that runs on this node has priority
    try:
        _, args = parse(job.command, os.environ)
    except SystemExit as ended:  # argparse has printed the reason
        raise UsageError(f"{order['name']}: [job] command: not a valid command line of bootrun") from ended
    args.config = os.devnull  # the job file has the settings; bootseer.toml in its directory is for bootrun
    fill(args, job.settings, os.environ)
    spec = build_spec(args, os.environ)
    os.environ.update(spec.tuning)  # helper processes inherit it
    told = {"": 0}

    def progress(stage: str, done: int, total: int) -> None:
        if done - told.get(stage, -PROGRESS_EVERY_BYTES) >= PROGRESS_EVERY_BYTES or done >= total:
            told[stage] = done
            tell("progress", stage=stage, done=done, total=total)

    limit = WarmLimits(order["max_bytes"], order["max_bytes_per_s"], order["hold_s"])

    def will_hold(digest: str) -> None:
        tell("will-hold", digest=digest)
        daemon.receive()

    def say(line: str) -> None:
        tell("said", text=line)

    send_to(say)
    warmer = Warmer(spec, limit, say, progress, will_hold)
    with closing(warmer):
        found = warmer.run(tuple(order["only"]))
        write(found, os.environ)
        tell("done", stages=[to_record(each) for each in found], holds=warmer.is_holding)
        warmer.hold()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads of libraries are not waited for
