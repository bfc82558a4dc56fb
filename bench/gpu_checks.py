"""Section `check` of `bench gpu`: bootseer's health checks on the real driver, and its counting of devices."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from bench.gpu_section import Section
from bench.launch import SCRIPTS
from bench.record import BenchError

CHECK_S = 25.0


def measure(section: Section) -> None:
    """With the devices that are there, then with one more, which has to fail."""
    from launcher.ranks.devices import count_devices

    count = count_devices("gpu", os.environ)
    section.sample("check_devices_counted", "devices", count)
    found, took_s = check(count)
    section.sample("check_s", "s", took_s)
    own = [each for each in found["findings"] if each["check"] == "accelerators"]
    failed = [each for each in found["findings"] if each["level"] in ("fail", "hung")]
    for each in own + [each for each in failed if each not in own]:
        section.say(f"{each['level']}: {each['check']} {each['where']}: {each['what']}")
    section.sample("check_accelerators", "findings", len(own))
    section.sample("check_accelerators_failed", "findings", sum(each in own for each in failed))
    more, _ = check(count + 1, "--only", "accelerators")
    if not any(each["level"] == "fail" for each in more["findings"]):
        raise BenchError(f"{count + 1} devices were expected, and nothing failed: {more['findings']}")
    section.say(f"with one more expected: {more['findings'][0]['what']}")


def check(count: int, *more: str) -> tuple[dict[str, Any], float]:
    """What `bootseer check` finds, and its seconds."""
    command = [os.path.join(SCRIPTS, "bootseer"), "check", "--expect-gpus", str(count), "--json", *more]
    began_s = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
    took_s = time.monotonic() - began_s
    if run.returncode not in (0, 3):
        raise BenchError(f"bootseer check: status {run.returncode}: {run.stderr[-500:]}")
    found: dict[str, Any] = json.loads(run.stdout)
    return found, took_s
