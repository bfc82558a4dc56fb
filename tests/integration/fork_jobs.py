"""The same job with exec'd and with forked ranks, for the tests that compare them.

In: what to run, through the real bootrun. Out: what each rank printed, how it ended, and what it wrote into the
folder out/. A job whose ranks did not come into being as asked is an error, so nothing is compared with itself.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import BOOTRUN, Programs

FORKED, EXECD = "on", "off"


class Job(NamedTuple):
    """A job that has ended."""

    status: int
    stdout: str  # bootrun's
    stderr: str
    statuses: dict[str, int]  # ATTEMPT/RANK: exit status, or minus the signal
    logs: dict[str, str]  # ATTEMPT/LOCAL_RANK/stdout.log and the like, without what differs between any two runs
    out: dict[str, Any]  # what ranks wrote below out/, JSON read
    seconds: float


class Jobs:
    """Runs jobs in one folder, always with the same paths."""

    def __init__(self, program: Programs, folder: Path) -> None:
        self._program = program
        self.folder = folder
        self.out = folder / "out"
        self._logs = folder / "logs"
        self._cache = folder / "cache"

    def run(
        self,
        fork_ranks: str,
        *words: str | os.PathLike[str],
        preload: str = "none",
        nproc: int = 1,
        redirects: str = "3",
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
        before: Sequence[str] = (),
        deadline_s: float = 60.0,
        how: str = "",
    ) -> Job:
        """Runs bootrun with these options and this script to its end.

        Args: preload: "" for the default; before: a command that runs bootrun; how: how ranks must have come into
            being, if not as `fork_ranks` says.
        """
        for path in (self.out, self._logs):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        options: list[str | os.PathLike[str]] = ["--standalone", "--nproc-per-node", str(nproc)]
        options += ["--fork-ranks", fork_ranks, *(["--preload", preload] if preload else [])]
        options += ["--log-dir", self._logs, "--redirects", redirects, "--restart-backoff", "0"]
        run = self._program(
            *(*before, BOOTRUN, *options, *words),
            env={"BOOTSEER_CACHE_DIR": os.fspath(self._cache), **(env or {})},
            cwd=os.fspath(cwd or self.folder),
            stdin=stdin,
            deadline_s=deadline_s,
        )
        assert list(self._logs.iterdir()), f"no rank was started\n{run.stderr}"
        events = self._read_events()
        found = {event["attrs"]["how"] for event in events if event["name"] == "rank_started"}
        wanted = how or ("fork" if fork_ranks == FORKED else "exec")
        assert found == {wanted}, f"ranks were started by {found}\n{run.stderr}"
        if wanted == "fork":
            assert "exec'd, not forked" not in run.stderr
        statuses = {
            f"{event['attempt']}/{event['rank']}": event["attrs"]["status"]
            for event in events
            if event["name"] == "rank_exited"
        }
        return Job(
            run.status,
            make_comparable(run.stdout),
            run.stderr,
            statuses,
            self._read_logs(),
            self._read_out(),
            run.seconds,
        )

    def both(self, *words: str | os.PathLike[str], **how: Any) -> tuple[Job, Job]:
        """The job with exec'd, then with forked ranks."""
        return self.run(EXECD, *words, **how), self.run(FORKED, *words, **how)

    def write(self, name: str, text: str) -> Path:
        """A file of the job's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def _read_events(self) -> list[dict[str, Any]]:
        (path,) = glob.glob(f"{self._logs}/*/events/agent-*.jsonl")
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def _read_logs(self) -> dict[str, str]:
        (run_dir,) = glob.glob(f"{self._logs}/*")
        found = {}
        for path in sorted(glob.glob(f"{run_dir}/attempt_*/*/*")):
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                found[os.path.relpath(path, run_dir).removeprefix("attempt_")] = make_comparable(file.read())
        return found

    def _read_out(self) -> dict[str, Any]:
        found = {}
        for path in sorted(self.out.iterdir()):
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="surrogateescape")
                found[path.name] = json.loads(text) if path.suffix == ".json" else make_comparable(text)
        return found


_CHANGING: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:_\w{8})?", "RUN"),
    (r"bootseer-\d+-[0-9a-f]{8}", "CGROUP"),
    (r"/proc/\d+/fd/\d+", "PAGE"),
    (r"(MASTER_PORT\W+)\d+", lambda match: match[1] + "PORT"),
    (r"(?<!\w)0x[0-9a-f]{6,}", "ADDRESS"),
    (r"(\"timestamp\": ?\"?)\d+", lambda match: match[1] + "TIME"),
    (r"(--fork-ranks(?:\\u0000|\W))(?:on|off)", lambda match: match[1] + "MODE"),
)


def make_comparable(text: str) -> str:
    """Without what differs between any two runs: ids, ports, addresses, times."""
    for pattern, replacement in _CHANGING:
        text = re.sub(pattern, replacement, text)
    return text
