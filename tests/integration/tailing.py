"""A program for tests: bootrun's output side alone. Copies log files to its console until told to finish.

argv: a JSON list of [path, rank, stream, prefix, needles, filtered path], and where to write what came of it.
A line on stdin (or its end) says that the writers have ended.
"""

import gc
import json
import os
import sys
import time

from launcher.base.loop import Loop
from launcher.ranks.output.console import Console
from launcher.ranks.output.tail import Tailer


def peak_rss_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    gc.disable()  # as bootrun has it: what is dropped must go without the collector
    logs, report_path = json.loads(sys.argv[1]), sys.argv[2]
    loop = Loop()
    console = Console(loop)
    tailer = Tailer(loop, console)
    for path, rank, stream, prefix, needles, filtered in logs:
        tailer.add(path, rank, stream, prefix.encode(), tuple(map(str.encode, needles)), filtered)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak counts from here
    began_bytes = peak_rss_bytes()
    notes: list[str] = []
    longest_s = 0.0
    finish_s = 0.0

    def finish() -> None:
        nonlocal finish_s
        os.read(0, 100)
        loop.remove_reader(0)
        finish_s = time.monotonic()
        tailer.finish(notes.append)

    loop.add_reader(0, finish)
    console.say("ready")
    while not notes:
        loop.run_once(1.0)
        # How long a round takes is how long everything else of bootrun has to wait.
        began_s = time.monotonic()
        loop.run_once(0.0)
        longest_s = max(longest_s, time.monotonic() - began_s)
    took_s = time.monotonic() - finish_s
    usage = time.process_time()
    tailer.close()
    drained = console.drain(0.5)
    console.close()
    loop.close()
    with open(report_path, "w") as report:
        json.dump(
            {
                "note": notes[0],
                "grown_bytes": peak_rss_bytes() - began_bytes,
                "longest_round_s": longest_s,
                "finish_s": took_s,
                "drained": drained,
                "cpu_s": usage,
            },
            report,
        )


main()
