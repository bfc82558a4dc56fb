"""What tests of --setup share: a machine with a virtual environment, an index of made wheels, and a store."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from bootseer.events import Event, read_events
from tests.integration.captured_envs import environ_of, make_venv
from tests.made_wheels import make_wheel
from tests.support import MARK, marked_processes, wait_until

# Tells which release of `small` ranks have.
SCRIPT = """
import os, small, sys
print("rank", os.environ["RANK"], "has", small.VERSION, "of", sys.prefix, flush=True)
"""


class Machine:
    """A node: its home, its cache, its virtual environment. Several may share wheels and store."""

    def __init__(self, folder: Path, wheels: Path | None = None, store: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.wheels = wheels or folder / "wheels"
        self.store = store or folder / "store"
        self.wheels.mkdir(exist_ok=True)
        self.store.mkdir(exist_ok=True)
        os.chmod(self.store, 0o755)
        self.place = folder / "place"  # all that a node changes
        self.place.mkdir()
        self.venv = self.place / "venv"
        make_venv(self.venv)
        self.pristine = folder / "pristine"
        shutil.copytree(self.venv, self.pristine, symlinks=True)
        self.environ: dict[str, str | None] = {
            **environ_of(folder),
            "BOOTSEER_CACHE": os.fspath(folder / "cache"),
            "PYTHON_EXEC": os.fspath(self.venv / "bin" / "python"),
            "OMP_NUM_THREADS": "1",
        }
        self.environ.pop("TMPDIR")
        self.requirements = folder / "requirements.txt"
        self.requirements.write_text("small==1.0\n")
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.runs = folder / "runs"  # a line for each time that set-up ran
        self.counts = True  # False: set-up is pip alone
        make_wheel(self.wheels, "small", "1.0", scripts={"small": "small:main"})

    @property
    def pip(self) -> str:
        """The command that installs the requirements."""
        venv = self.venv / "bin" / "python"
        return (
            f"{sys.executable} -m pip --python {venv} install -q --no-index --find-links {self.wheels} "
            f"-r {self.requirements}"
        )

    def flags(self, *more: str, store: str | None = None, keeps_caches: bool = False) -> list[str]:
        """Of bootrun, with set-up. `keeps_caches`: as is the default with a store, and takes time."""
        where = os.fspath(self.store) if store is None else store
        found = ["--standalone", "--setup", f"{self.pip} && echo ran >> {self.runs}" if self.counts else self.pip]
        found += ["--setup-input", os.fspath(self.requirements), "--setup-target", os.fspath(self.venv)]
        found += ["--env-store", where] if where else []
        return [*found, *([] if keeps_caches else ["--no-keep-caches"]), *more]

    def as_node(self, own: Path, *, shares_place: bool = False) -> list[str]:
        """Words before a command by which it runs on a node of its own, at the same paths. Needs root.

        `shares_place`: the environment is on a file system that all nodes have.
        """
        (own / "cache").mkdir(parents=True)
        shutil.copytree(self.pristine, own / "place" / "venv", symlinks=True)
        (self.folder / "cache").mkdir(exist_ok=True)
        binds = [(own / "place", self.place), (own / "cache", self.folder / "cache")][shares_place:]
        lines = " && ".join(f"mount --bind {source} {target}" for source, target in binds)
        return ["unshare", "--mount", "/bin/sh", "-c", f'{lines} && exec "$@"', "sh"]

    def count(self) -> int:
        """How often set-up ran."""
        return len(self.runs.read_text().splitlines()) if self.runs.exists() else 0

    def renew(self) -> None:
        """As a node that has never run the job: the environment as it was, an empty cache."""
        shutil.rmtree(self.venv)
        shutil.copytree(self.pristine, self.venv, symlinks=True)
        shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def snapshots(self) -> list[Path]:
        """In the store."""
        return sorted(self.store.glob("keys/*/env-*.json"))


def services_end(deadline_s: float = 60.0) -> None:
    """Until nothing that a job left to be finished runs any more."""

    def is_over() -> bool:
        return not [p for p in marked_processes(os.environ[MARK]) if "bootseer.env." in p.command]

    wait_until(is_over, deadline_s, "the end of keepers")


def setup_span(log_dir: Path) -> Event:
    """The end of the span of set-up, of a job's only run."""
    (found,) = [event for event in agent_events(log_dir) if event.name == "setup" and event.kind == "end"]
    return found


def agent_events(log_dir: Path) -> Iterator[Event]:
    """All events below the logs."""
    for path in sorted(log_dir.glob("*/events/*.jsonl")):
        yield from read_events(os.fspath(path))
