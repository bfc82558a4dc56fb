"""Turns what a run of a probe left (files, output, statuses) into facts: JSON values without anything random.

Ports, pids, temporary paths, host names and random parts of names become fixed words; everything else stays.
"""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import sys
from typing import Any, NamedTuple

from tests.parity.model import Observation, Probe

_PAGE = re.compile(r"failure-\d+\.(?:txt|json)")

UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
# The last part of a run's log directory is drawn at random, as tempfile does it.
RANDOM = re.compile(r"_[A-Za-z0-9_]{8}(?=/attempt_)")
TEMP = re.compile(r"(?<=tmp/)([a-z]+_)[A-Za-z0-9_]{8}")
LAUNCHER_TRACEBACK = re.compile(
    r"Traceback \(most recent call last\):\n\s+File \"[^\"]*(?:torchrun|bootrun|torch/|launcher/)"
)
MAX_FILE_CHARS = 2000


class Seen(NamedTuple):
    """What the runner brings home from a run."""

    dir: str
    ports: tuple[int, ...]
    statuses: dict[str, int | str]
    missed: tuple[str, ...]  # marks that did not come
    seconds: float
    left: tuple[str, ...]  # command lines
    stdout: tuple[str, ...]  # by agent
    stderr: tuple[str, ...]


def observe(probe: Probe, seen: Seen) -> Observation:
    """The facts that the probe compares."""
    facts: dict[str, Any] = {}
    for name in probe.facts:
        facts[name] = GATHER[name](probe, seen)
    if seen.missed:
        facts["missed"] = list(seen.missed)
    plain: Observation = _normal(facts, seen)
    return plain


# ---- single facts ------------------------------------------------------------------------------------------


def _status(_probe: Probe, seen: Seen) -> Any:
    return seen.statuses


def _reported(_probe: Probe, seen: Seen) -> Any:
    told = {}
    for name in sorted(os.listdir(f"{seen.dir}/out")):
        if name.endswith(".json"):
            with open(f"{seen.dir}/out/{name}", encoding="utf-8") as file:
                told[name.removesuffix(".json")] = json.load(file)
    return told


def _stdout(_probe: Probe, seen: Seen) -> Any:
    return {str(number): sorted(text.splitlines()) for number, text in enumerate(seen.stdout)}


def _said(_probe: Probe, seen: Seen) -> Any:
    """Lines of standard error that ranks wrote; they hold the word `say`."""
    own = {
        str(number): re.split(r"^={10,}$", text, flags=re.MULTILINE)[0] for number, text in enumerate(seen.stderr)
    }
    return {
        number: sorted(line for line in text.splitlines() if re.search(r"\bsay\b", line))
        for number, text in own.items()
    }


def _stderr(_probe: Probe, seen: Seen) -> Any:
    return {str(number): text.splitlines() for number, text in enumerate(seen.stderr)}


def _tree(_probe: Probe, seen: Seen) -> Any:
    found = []
    for root in (f"{seen.dir}/logs", f"{seen.dir}/tmp"):
        for directory, directories, files in os.walk(root):
            directories[:] = [name for name in directories if name != "events"]
            own = [name for name in files if not _PAGE.fullmatch(name)]
            names = [*own, *(f"{name}/" for name in directories if not os.listdir(f"{directory}/{name}"))]
            found += [os.path.relpath(f"{directory}/{name}", seen.dir) for name in names]
    # multiprocessing makes folders in TMPDIR; event files and pages of failures are facts of their own.
    return sorted(path for path in found if not path.startswith("tmp/pymp-"))


def _pages(_probe: Probe, seen: Seen) -> Any:
    """Pages of failures beside the attempts."""
    found = [name for _directory, _directories, files in os.walk(f"{seen.dir}/logs") for name in files]
    return sorted(name for name in found if _PAGE.fullmatch(name))


def _events(_probe: Probe, seen: Seen) -> Any:
    """Whether there is a folder with event files beside the attempts."""
    return any(
        directory.endswith("/events") and files for directory, _directories, files in os.walk(f"{seen.dir}/logs")
    )


def _files(_probe: Probe, seen: Seen) -> Any:
    contents: dict[str, Any] = {}
    for path in _tree(_probe, seen):
        whole = f"{seen.dir}/{path}"
        if os.path.isfile(whole) and not path.endswith("error.json"):
            with open(whole, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
            contents[path] = text if len(text) <= MAX_FILE_CHARS else f"{len(text)} characters"
    return contents


def _filtered(_probe: Probe, seen: Seen) -> Any:
    """Lines of the files of filters; their order is not fixed."""
    found = {}
    for path in _tree(_probe, seen):
        if "filtered_" in path:
            with open(f"{seen.dir}/{path}", encoding="utf-8") as file:
                found[path] = sorted(file.read().splitlines())
    return found


def _stdout_whole(_probe: Probe, seen: Seen) -> Any:
    """Whether every line of the probe `logs-large` is there once and in one piece."""
    lines = [f"[default{rank}]:say line {rank} {n} {'x' * 50}" for rank in range(2) for n in range(20000)]
    return sorted(seen.stdout[0].splitlines()) == sorted(lines)


def _runs(_probe: Probe, seen: Seen) -> Any:
    """How many runs have logs below the log directory."""
    return len(os.listdir(f"{seen.dir}/logs"))


def _attempts(_probe: Probe, seen: Seen) -> Any:
    """How many attempt directories each run below the log directory has."""
    return sorted(len(glob.glob(f"{seen.dir}/logs/{run}/attempt_*")) for run in os.listdir(f"{seen.dir}/logs"))


def _error_files(_probe: Probe, seen: Seen) -> Any:
    contents: dict[str, Any] = {}
    for path in _tree(_probe, seen):
        if path.endswith("error.json"):
            contents[path] = _error_file(f"{seen.dir}/{path}")
    if os.path.exists(f"{seen.dir}/own-error.json"):
        contents["own"] = _error_file(f"{seen.dir}/own-error.json")
    return contents


def _error_file(path: str) -> Any:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        data = json.loads(text)
    except ValueError:
        return {"not JSON": text}
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, dict) and "extraInfo" in message:
        extra = message["extraInfo"]
        extra["timestamp"] = "<seconds>" if str(extra.get("timestamp", "")).isdigit() else extra.get("timestamp")
        extra["py_callstack"] = (extra.get("py_callstack") or "").strip().splitlines()[-1:]
    return data


def _report(_probe: Probe, seen: Seen) -> Any:
    return {str(number): parse_report(text) for number, text in enumerate(seen.stderr)}


def _root_exitcode(_probe: Probe, seen: Seen) -> Any:
    report = parse_report(seen.stderr[0])
    return report["root"]["exitcode"] if report else None


def _root_traceback(_probe: Probe, seen: Seen) -> Any:
    """All of the report from the traceback of the first failure on."""
    return seen.stderr[0].rpartition("traceback :")[2].strip()


def _stderr_names(probe: Probe, seen: Seen) -> Any:
    """Whether standard error has the word anywhere."""
    return {str(number): probe.culprit in text for number, text in enumerate(seen.stderr)}


def _quick(probe: Probe, seen: Seen) -> Any:
    return seen.seconds < probe.quick_s


def _left(_probe: Probe, seen: Seen) -> Any:
    found = []
    for command in seen.left:
        child = re.search(r"\bchild-[\w-]+", command)
        found.append(child[0] if child else "rank" if "script.py" in command else command)
    return sorted(found)


def _traceback(_probe: Probe, seen: Seen) -> Any:
    """Whether the launcher itself shows a Python traceback; those of ranks begin elsewhere."""
    return {str(number): LAUNCHER_TRACEBACK.search(text) is not None for number, text in enumerate(seen.stderr)}


def _lines(_probe: Probe, seen: Seen) -> Any:
    """How many lines of standard error there are."""
    return {str(number): len(text.replace("\n\n", "\n").splitlines()) for number, text in enumerate(seen.stderr)}


def _culprit(probe: Probe, seen: Seen) -> Any:
    """Whether the last line names what is wrong."""
    return {str(n): probe.culprit in (text.strip().splitlines() or [""])[-1] for n, text in enumerate(seen.stderr)}


def _help(_probe: Probe, seen: Seen) -> Any:
    """The flags of the help text, in the spelling with dashes."""
    flags = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", _synopsis(seen.stdout[0])))
    return dict.fromkeys(sorted(flag for flag in flags if "_" not in flag), True)


def _synopsis(text: str) -> str:
    lines = [line for line in text.splitlines() if re.match(r"\s{1,8}-", line)]
    return "\n".join(re.split(r"\s{2,}", line.strip(), maxsplit=1)[0] for line in lines)


GATHER = {
    "status": _status,
    "told": _reported,
    "stdout": _stdout,
    "said": _said,
    "stderr": _stderr,
    "tree": _tree,
    "files": _files,
    "filtered": _filtered,
    "stdout_whole": _stdout_whole,
    "events": _events,
    "pages": _pages,
    "runs": _runs,
    "attempts": _attempts,
    "error_files": _error_files,
    "report": _report,
    "report.root.exitcode": _root_exitcode,
    "report.root.traceback_text": _root_traceback,
    "stderr_names": _stderr_names,
    "quick": _quick,
    "left": _left,
    "traceback": _traceback,
    "lines": _lines,
    "culprit": _culprit,
    "help": _help,
}

# ---- the final report --------------------------------------------------------------------------------------

BLOCK = re.compile(r"^\[\d+\]:\n(?:  .*\n?)+", re.MULTILINE)
FIELD = re.compile(r"^  (?P<name>time|host|rank|exitcode|error_file|traceback) *: ?(?P<text>.*)", re.MULTILINE)


def parse_report(text: str) -> Any:
    """The box at the end of standard error; None when there is none."""
    title = re.search(r"^={10,}\n(.*) FAILED\n", text, re.MULTILINE)
    if title is None:
        return None
    others, _, root = text[title.end() :].partition("Root Cause (first observed failure):")
    roots = [_failure(found[0]) for found in BLOCK.finditer(root)]
    return {
        "title": title[1],
        "root": roots[0] if len(roots) == 1 else roots,
        "others": sorted((_failure(found[0]) for found in BLOCK.finditer(others)), key=lambda one: one["rank"]),
        "no others": "<NO_OTHER_FAILURES>" in others,
    }


def _failure(block: str) -> dict[str, Any]:
    field = {found["name"]: found["text"] for found in FIELD.finditer(block)}
    rank = re.match(r"(\d+) \(local_rank: (\d+)\)", field["rank"])
    exitcode = re.match(r"(-?\d+) \(pid: \d+\) ? ?(?:\((\w+)\))?", field["exitcode"])
    assert rank is not None and exitcode is not None, block
    said = re.split(r"\n  (?=stderr +: )", block.partition("  traceback :")[2])[0].strip().splitlines()
    return {
        "rank": int(rank[1]),
        "local_rank": int(rank[2]),
        "exitcode": int(exitcode[1]),
        "signal": exitcode[2],
        "error_file": field["error_file"],
        "time": re.sub(r"\d", "0", field["time"])[:19],
        "host": "<this host>" if _is_this_host(field["host"]) else field["host"],
        "traceback": re.sub(r"\bPID \d+", "PID 0", said[-1].strip()) if said else "",
    }


# ---- making it repeatable ----------------------------------------------------------------------------------


def _normal(value: Any, seen: Seen, name: str = "") -> Any:
    if isinstance(value, dict):
        return {_text(key, seen): _normal(one, seen, key) for key, one in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_normal(one, seen) for one in value]
    if isinstance(value, str):
        if name == "MASTER_ADDR" and _is_this_host(value):
            return "<this host>"
        if name == "MASTER_PORT" and value.isdigit() and int(value) not in seen.ports:
            return "<a free port>"
        return _text(value, seen)
    return value


def _text(text: str, seen: Seen) -> str:
    text = text.replace(seen.dir, "{dir}")
    for number, port in enumerate(seen.ports):
        text = re.sub(rf"(?<!\d){port}(?!\d)", "{port}" if number == 0 else f"{{port{number + 1}}}", text)
    text = re.sub(rf"{re.escape(os.path.dirname(sys.executable))}/python[0-9.]*", "{python}", text)
    text = RANDOM.sub("_{random}", UUID.sub("{uuid}", text))
    return TEMP.sub(r"\1{random}", text)


def _is_this_host(address: str) -> bool:
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    if address in names:
        return True
    try:
        return socket.gethostbyname(address) == socket.gethostbyname(socket.gethostname())
    except OSError:
        return False
