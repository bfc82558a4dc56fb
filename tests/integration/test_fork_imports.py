"""What modules see when they are imported: the same in forked ranks as in exec'd ones, and in torchrun's.

A stand-in for torch and small libraries lie in a folder called site-packages. Each case is started with exec'd
ranks, then twice as by default, each time with a restart; what ranks saw is compared.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from bench.fork_fallbacks import PREFIX, read_events
from tests import support

LIBRARIES = {
    "torch/__init__.py": "from . import tensors",
    "torch/tensors.py": "import os\nTHREADS = os.environ.get('TORCH_THREADS')",
    "torch/distributed.py": "import torch.tensors",
    "plain.py": "import json",
    "hub.py": "import os\nHOME = os.environ.get('HUB_HOME', 'default')",
    "uses_hub.py": "from hub import HOME",
    "dotenv_like.py": """
        import os
        def load(path):
            for line in open(path):
                name, _, value = line.strip().partition("=")
                os.environ[name] = value
        """,
    "reader.py": "VALUE = open('settings').read() if __import__('os').path.exists('settings') else None",
    "home_reader.py": """
        import os
        path = os.environ["CASE"] + "/at-home"
        VALUE = os.path.exists(path) and open(path).read()
        """,
    "base.py": "value = 1",
    "derived.py": "from base import value",
    "argument.py": "import sys\nCOUNT = len(sys.argv)",
    "metrics/__init__.py": "from . import prints, more",
    "metrics/prints.py": "import os\nRANK = int(os.environ.get('LOCAL_RANK', -1))",
    "metrics/more.py": "import plain",
    "trainer.py": "import metrics, other\nRANK = metrics.prints.RANK",
    "other.py": "import json, hub",
    "zero.py": """
        import os
        def only(function):
            return lambda: function() if only.rank == 0 else None
        only.rank = getattr(only, "rank", int(os.environ.get("LOCAL_RANK", -1)))
        """,
    "uses_zero.py": "import zero\n@zero.only\ndef say():\n    return 'said'",
    "asks_zero.py": "import zero\nIS_FIRST = zero.only.rank == 0",
}

HEAD = """
import json, os, sys
attempt, folder = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["CASE"]
names = [name for name in sys.modules if getattr(sys.modules[name], "__file__", None)]
early = sorted(name for name in names if "/case/site-packages/" in sys.modules[name].__file__)
"""
TAIL = """
import bootseer, time
bootseer.heartbeat(1)
with open("%s/seen-%s" % (folder, attempt), "w") as file:
    json.dump([early, seen], file)
os.rename("%s/seen-%s" % (folder, attempt), "%s/seen-%s.json" % (folder, attempt))
while attempt == "0" and not os.path.exists(folder + "/go"):
    time.sleep(0.002)
sys.exit(3 if attempt == "0" else 0)
"""


class Seen(NamedTuple):
    """Of one attempt."""

    early: list[str]  # libraries that were there at the script's first statement
    values: Any
    how: str


class Case:
    """A script with its files, and starts of it."""

    def __init__(self, bootrun: support.Programs) -> None:
        self.bootrun = bootrun
        self.dir = os.path.join(bootrun.dir, "case")
        for name, text in LIBRARIES.items():
            self.write(f"site-packages/{name}", textwrap.dedent(text))

    def write(self, name: str, text: str) -> str:
        path = os.path.join(self.dir, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(textwrap.dedent(text))
        return path

    def script(self, text: str) -> None:
        self.write("train.py", HEAD + textwrap.dedent(text) + TAIL)

    def start(
        self, fork_ranks: str = "auto", env: Mapping[str, str] | None = None, preloads: int = 1
    ) -> tuple[list[Seen], str]:
        """One start, with a restart after this many preloads: both attempts, and bootrun's stderr."""
        self.clean()
        place = f"{self.dir}/start{len(glob.glob(f'{self.dir}/start*'))}"
        environ = {
            "PYTHONPATH": f"{self.dir}/site-packages",
            "BOOTSEER_CACHE_DIR": f"{self.dir}/cache",
            "CASE": self.dir,
            **(env or {}),
        }
        words = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "1", "--restart-backoff", "0"]
        program = self.bootrun.start(
            *(
                *words,
                "--fork-ranks",
                fork_ranks,
                "--log-dir",
                f"{place}/logs",
                "--shutdown-timeout",
                "5",
                "train.py",
            ),
            env=environ,
            cwd=self.dir,
        )
        process = program.process
        support.wait_until(lambda: os.path.exists(f"{self.dir}/seen-0.json") or process.poll() is not None)
        if fork_ranks != "off":
            support.wait_until(
                lambda: count_preloads(place) >= preloads or process.poll() is not None, what="fork_server"
            )
        with open(f"{self.dir}/go", "w"):
            pass
        run = program.wait()
        assert run.status == 0, run.stderr
        hows = [event["attrs"]["how"] for event in read_events(place) if event["name"] == "rank_started"]
        return self.read(hows), run.stderr

    def clean(self) -> None:
        for path in [*glob.glob(f"{self.dir}/seen-*"), f"{self.dir}/go"]:
            if os.path.exists(path):
                os.unlink(path)

    def read(self, hows: list[str]) -> list[Seen]:
        seen = []
        for attempt, how in enumerate(hows):
            with open(f"{self.dir}/seen-{attempt}.json", encoding="utf-8") as file:
                seen.append(Seen(*json.load(file), how))
        return seen

    def start_under(self, torchrun: support.Programs) -> list[Seen]:
        """One start by torchrun, with a restart. It imports torch itself, so that ranks alone get the stand-in."""
        self.clean()
        self.write("go", "")
        python = self.write(
            "python", f'#!/bin/sh\nPYTHONPATH={self.dir}/site-packages exec {sys.executable} "$@"\n'
        )
        os.chmod(python, 0o755)
        words = ("--standalone", "--nproc-per-node", "1", "--max-restarts", "1", "train.py")
        run = torchrun(*words, env={"PYTHON_EXEC": python, "CASE": self.dir}, cwd=self.dir)
        assert run.status == 0, run.stderr
        return self.read(["torchrun", "torchrun"])

    def check(self, wanted: list[str], first: str = "exec", env: Mapping[str, str] | None = None) -> None:
        """Two starts see what exec'd ranks see; `wanted` is preloaded from the first restart on.

        Args: first: how the very first attempt is started.
        """
        plain, _ = self.start("off", env)
        assert [seen.how for seen in plain] == ["exec", "exec"]
        for number in (0, 1):
            found, said = self.start(env=env, preloads=2 if first == "fork" and not number else 1)
            assert [seen.values for seen in found] == [seen.values for seen in plain], said
            assert [seen.how for seen in found] == [first if number == 0 else "fork", "fork"], said
            for seen in found[1 - number :]:
                assert seen.early == wanted


def count_preloads(place: str) -> int:
    """How often a process has imported what it is to import."""
    return sum(event["name"] == "preload" and event["kind"] == "end" for event in read_events(place))


@pytest.fixture
def case(bootrun: support.Programs) -> Case:
    return Case(bootrun)


def test_a_library_that_sets_variables_from_a_file(case: Case) -> None:
    case.write(".env", "HUB_HOME=/data\n")
    case.script(
        """
        import dotenv_like
        dotenv_like.load(".env")
        import torch, hub, uses_hub, plain
        seen = [hub.HOME, uses_hub.HOME]
        """
    )
    case.check(["dotenv_like", "plain", "torch", "torch.distributed", "torch.tensors"])


def test_a_module_of_the_users_that_sets_variables(case: Case) -> None:
    """torch is imported before it, so that it can be preloaded at once."""
    case.write(
        "config.py", "import os\nnames = ['HUB', 'HOME']\nos.environ.setdefault('_'.join(names), '/data')\n"
    )
    case.script("import torch, plain, config, hub, uses_hub\nseen = [hub.HOME, uses_hub.HOME]\n")
    case.check(["plain", "torch", "torch.distributed", "torch.tensors"], first="fork")


def test_files_and_directories_that_a_script_changes(case: Case) -> None:
    case.write("sub/settings", "of the folder")
    case.script(
        """
        import torch
        with open(folder + "/at-home", "w") as file:
            file.write(attempt)
        import home_reader, plain
        os.chdir("sub")
        import reader
        seen = [home_reader.VALUE, reader.VALUE]
        """
    )
    case.check(["plain", "torch", "torch.distributed", "torch.tensors"], first="fork")


def test_what_a_script_changes_within_the_interpreter(case: Case) -> None:
    case.script(
        """
        import torch, base, plain
        base.value = 2
        sys.argv.append("more")
        import derived, argument, hub
        seen = [derived.value, argument.COUNT]
        """
    )
    case.check(["base", "hub", "plain", "torch", "torch.distributed", "torch.tensors"], first="fork")


def test_torch_itself_would_have_seen_another_value(case: Case) -> None:
    case.write("config.py", "import os\nos.environ['_'.join(['TORCH', 'THREADS'])] = '1'\n")
    case.script("import config\nimport torch\nseen = torch.tensors.THREADS\n")
    for _ in range(2):
        found, said = case.start(preloads=0)
        assert [(seen.values, seen.how) for seen in found] == [("1", "exec")] * 2
        assert said.count(PREFIX) == 1
    why = "torch.tensors reads TORCH_THREADS when it is imported, and config.py changes it earlier"
    assert PREFIX + why in said


def test_a_change_that_no_start_before_has_shown(case: Case) -> None:
    """A rank that finds out begins anew, without what was preloaded; the next start knows."""
    case.script(
        """
        import torch, plain
        if os.path.exists(folder + "/home"):
            os.environ["HUB_HOME"] = open(folder + "/home").read()
        import hub
        seen = hub.HOME
        """
    )
    found, _ = case.start(preloads=2)
    assert [seen.values for seen in found] == ["default"] * 2
    case.write("home", "/data")
    found, said = case.start()
    assert [seen.values for seen in found] == ["/data"] * 2
    assert found[0].early == []
    assert "warning: " in said and "hub reads HUB_HOME when it is imported, and train.py has changed it" in said
    found, said = case.start()
    assert "warning: " not in said
    assert [seen.values for seen in found] == ["/data"] * 2
    assert found[0].early == ["plain", "torch", "torch.distributed", "torch.tensors"]


def test_modules_that_read_the_rank_are_left_to_the_ranks(case: Case) -> None:
    """And what imports them; all else that these import is preloaded."""
    case.script("import torch, trainer\nseen = [trainer.RANK, trainer.metrics.prints.RANK]\n")
    case.check(["hub", "other", "plain", "torch", "torch.distributed", "torch.tensors"], first="fork")
    for place in glob.glob(f"{case.dir}/start[12]"):
        preloads = [event for event in read_events(place) if event["name"] == "preload" and event["kind"] == "end"]
        assert [event.get("error") for event in preloads] == [None] * len(preloads)


def test_an_attribute_that_each_rank_makes_again(case: Case) -> None:
    """As torchmetrics and Lightning have it."""
    case.script("import torch, uses_zero, zero\nseen = [uses_zero.say(), zero.only.rank]\n")
    case.check(["torch", "torch.distributed", "torch.tensors", "uses_zero", "zero"], first="fork")


def test_an_import_asks_for_what_ranks_make_again(case: Case) -> None:
    """It is left to them, with the attribute and all that imports it; a preload is lost for that."""
    case.script("import torch, uses_zero, asks_zero\nseen = [uses_zero.say(), asks_zero.IS_FIRST]\n")
    plain, _ = case.start("off")
    for number in range(3):
        found, said = case.start(preloads=1 if number else 2)
        assert [seen.values for seen in found] == [seen.values for seen in plain] == [["said", True]] * 2
        assert [seen.how for seen in found] == ["fork", "fork"], said
    assert found[0].early == ["torch", "torch.distributed", "torch.tensors"]
    events = [event for place in glob.glob(f"{case.dir}/start[123]") for event in read_events(place)]
    failed = [event["error"] for event in events if event["name"] == "preload" and "error" in event]
    assert failed == ["zero reads LOCAL_RANK when it is imported"]


def test_the_same_script_under_torchrun(case: Case, torchrun: support.Programs) -> None:
    """A library that a file's variables decide, and a module of the user's that reads all that can differ."""
    case.write(".env", "HUB_HOME=/data\n")
    case.write("sub/settings", "of the folder")
    case.write(
        "mine.py",
        """
        import os
        HOME, HERE = os.environ.get("HUB_HOME"), os.path.basename(os.getcwd())
        with open("settings") as file:
            TEXT = file.read()
        """,
    )
    case.script(
        """
        import dotenv_like
        dotenv_like.load(".env")
        os.chdir("sub")
        import torch, hub, uses_hub, plain, reader, mine
        seen = [hub.HOME, uses_hub.HOME, reader.VALUE, mine.HOME, mine.HERE, mine.TEXT]
        """
    )
    theirs = case.start_under(torchrun)
    first, _ = case.start()
    second, said = case.start()
    all_of = [*theirs, *first, *second]
    lines = [f"{seen.how:8} attempt {number % 2}: {seen.values}" for number, seen in enumerate(all_of)]
    print("\n".join(lines))
    assert [seen.how for seen in all_of] == ["torchrun"] * 2 + ["exec"] + ["fork"] * 3, said
    wanted = ["/data", "/data", "of the folder", "/data", "sub", "of the folder"]
    assert [seen.values for seen in all_of] == [wanted] * 6
    # Another module might look at the working folder.
    assert second[0].early == ["dotenv_like", "torch", "torch.distributed", "torch.tensors"]
