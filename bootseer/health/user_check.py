"""A user's own check: an executable that prints its findings as JSON on stdout.

It runs as the calling user, without a shell, in the process group of the process that runs the check (runner.py
ends all of it in time). Out: an object with "level" (ok, warn, fail, unknown) and "what", and optionally "where",
"measured", "limit", "unit", "way_out"; or a list of these. Without output its exit status decides.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess

from bootseer.health.finding import FAIL, OK, UNKNOWN, Finding, from_json, one_line
from bootseer.linux.processes import set_death_signal

MAX_OUTPUT_BYTES = 256 << 10
MAX_ERROR_BYTES = 16 << 10
_FIX_CHECK = "fix the check: docs/guide/checks.md describes its output"


def name_of(path: str) -> str:
    return f"own:{one_line(os.path.basename(path))[:64]}"


def run_own(path: str) -> list[Finding]:
    """Run an executable to its end and return its findings."""
    name = name_of(path)
    # If the parent process is killed, the children of the executable have to end too: no other process ends them.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    set_death_signal(signal.SIGTERM)
    try:
        process = subprocess.Popen(
            [path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: set_death_signal(signal.SIGKILL),  # noqa: PLW1509  this process has one thread
        )
    except OSError as error:
        way_out = "name a program, or a script with a first line such as #!/bin/sh, that this user may execute"
        return [Finding(name, UNKNOWN, f"cannot be run: {error.strerror}", path, way_out=way_out)]
    with process:
        out, said, is_cut = _drain(process)
        if is_cut:
            process.kill()
    return judge_own(name, path, process.returncode, out, said, is_cut)


def _drain(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes, bool]:
    """Return stdout, the end of stderr, and whether stdout exceeded the limit."""
    assert process.stdout is not None and process.stderr is not None
    out, said = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    said += data
                    del said[:-MAX_ERROR_BYTES]
                else:
                    out += data
                    if len(out) > MAX_OUTPUT_BYTES:
                        return bytes(out), bytes(said), True
    return bytes(out), bytes(said), False


def judge_own(name: str, path: str, status: int, out: bytes, said: bytes, is_cut: bool) -> list[Finding]:
    """Judge the output. Args: status: exit status, or minus a signal; said: stderr; is_cut: it wrote too much."""
    last = one_line(said.decode(errors="replace").strip().rpartition("\n")[2])
    if is_cut:
        what = f"it wrote more than {MAX_OUTPUT_BYTES >> 10} KiB"
        return [Finding(name, UNKNOWN, what, path, way_out=_FIX_CHECK)]
    if status < 0:
        what = f"it was ended by signal {-status}" + (f": {last}" if last else "")
        return [Finding(name, UNKNOWN, what, path, way_out="find the reason (dmesg, if it ran out of memory)")]
    findings: list[Finding] = []
    if out.strip():
        try:
            findings = from_json(name, json.loads(out))
        except (ValueError, RecursionError) as error:
            if not status:
                what = f"its output is not a finding: {one_line(str(error))[:200]}"
                return [Finding(name, UNKNOWN, what, path, way_out=_FIX_CHECK)]
    if status and not any(found.level == FAIL for found in findings):
        what = f"it ended with status {status}" + (f": {last}" if last else "")
        findings.append(Finding(name, FAIL, what, path, way_out="see what it checks"))
    return findings or [Finding(name, OK, "in order", path)]
