"""Which statements make an attribute of RANK and the like in a form that ranks can repeat, and who has used it."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launcher import import_watch, rank_values

METRICS = 'only.rank = getattr(only, "rank", int(os.environ.get("LOCAL_RANK", 0)))'
GET_RANK = """
def _get_rank() -> "int | None":
    '''Of whoever has started it.'''
    keys = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    for key in keys:
        rank = os.environ.get(key)
        if rank is not None:
            return int(rank)
    return None
"""
FABRIC = 'only.rank = getattr(only, "rank", _get_rank() or 0)'


@pytest.mark.parametrize(
    "text",
    [
        METRICS,
        GET_RANK + FABRIC,
        GET_RANK.replace("return None", "return -1") + FABRIC,
        'only.rank = getattr(only, "rank", os.environ["RANK"])',
        'only.rank = getattr(only, "rank", int(os.environ.get("LOCAL_RANK", -1)))',
        'only.rank = getattr(only, "rank", os.getenv("RANK") or os.getenv("LOCAL_RANK", "0"))',
        'only.rank = getattr(\n    only,\n    "rank",\n    int(os.environ.get("LOCAL_RANK", 0)),\n)',
        'other = only.rank = 1\nonly.rank = getattr(only, "rank", int(os.getenv("RANK", "0")))',
    ],
)
def test_what_depends_on_variables_alone_has_the_form(text: str) -> None:
    (found,) = rank_values.find_statements(text.encode(), "library.py")
    assert (found.owner, found.attribute) == ("only", "rank")
    lines = text.splitlines()[found.first - 1 : found.last]
    assert lines[0].startswith("only.rank = getattr(") and lines[-1].endswith(")")


@pytest.mark.parametrize(
    "text",
    [
        'RANK = int(os.environ.get("LOCAL_RANK", 0))',
        'only.rank = int(os.environ.get("LOCAL_RANK", 0))',
        'only.rank = getattr(only, "other", int(os.environ.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(other, "rank", int(os.environ.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(only, "rank")',
        'only.rank = other.rank = getattr(only, "rank", int(os.environ.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(only, "rank", count(os.environ.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(only, "rank", START + int(os.environ.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(only, "rank", int(settings.get("LOCAL_RANK", 0)))',
        'only.rank = getattr(only, "rank", os.environ.setdefault("LOCAL_RANK", "0"))',
        'only.rank = getattr(only, "rank", lambda: os.environ["RANK"])',
        METRICS + "; count = only.rank",
        "if True:\n    " + METRICS,
        FABRIC,
        GET_RANK + GET_RANK + FABRIC,
        "@cached" + GET_RANK + FABRIC,
        GET_RANK.replace("()", "(default=0)") + FABRIC,
        GET_RANK.replace("return None", "return START") + FABRIC,
        GET_RANK.replace("return None", "return socket.gethostname()") + FABRIC,
        GET_RANK.replace("return None", "global START\n    START = 1") + FABRIC,
        GET_RANK.replace("return None", "os.environ[keys] = 'seen'") + FABRIC,
        GET_RANK.replace("return None", "return os") + FABRIC,
        GET_RANK.replace("return None", "return os.environ.pop") + FABRIC,
        GET_RANK.replace("return None", "while True:\n        pass") + FABRIC,
        GET_RANK.replace("return None", "int = os.getcwd") + FABRIC,
    ],
)
def test_anything_else_has_not(text: str) -> None:
    assert rank_values.find_statements(text.encode(), "library.py") == []


# As the preloaded process does it, then as a rank.
PRELOADING = """
import json, os, sys
sys.path.insert(0, os.getcwd())
loaded = []
for path in sys.argv[1:3]:
    loaded.append({"__name__": "_bootseer_rank"})
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), loaded[-1])
watching, made = loaded
values = made["RankValues"](watching["PER_RANK"], watching["find_module_frame"])
watch = watching["Watch"](False, values.take)
watch.install()
try:
    import user
except Exception as error:
    failed = repr(error)
else:
    failed = ""
watch.remove()
reads, used = list(watch.rank_reads), values.find_used()
os.environ.update(RANK="5", LOCAL_RANK="3")
values.make_anew()
import prints
print(json.dumps([reads, used, repr(getattr(prints.only, "rank", "none")), sys.gettrace() is None, failed]))
"""
PRINTS = f"""
import os
from functools import wraps

def only(function):
    @wraps(function)
    def wrapped(*args):
        return function(*args) if only.rank == 0 else None
    return wrapped

{METRICS}

@only
def say(text):
    print(text)
"""


def preload(folder: Path, user: str, prints: str = PRINTS) -> tuple[list[object], list[object], str, str]:
    """Who reads variables, who uses what comes of them, and what a rank has in the end."""
    (folder / "user.py").write_text(textwrap.dedent(user))
    if not (folder / "prints.py").exists():
        (folder / "prints.py").write_text(prints)
    environ = {name: value for name, value in os.environ.items() if name not in import_watch.PER_RANK}
    words = [sys.executable, "-c", PRELOADING, import_watch.__file__, rank_values.__file__]
    ended = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    reads, used, value, is_untraced, failed = json.loads(ended.stdout.splitlines()[-1])
    assert is_untraced
    return reads, used, value, failed


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    user = """
        import prints
        from prints import only, say

        @prints.only
        def first():
            print(only.rank)

        class Logger:
            @only
            def log(self):
                return only.rank + 1
    """
    assert preload(tmp_path, user) == ([], [], "3", "")


def test_a_function_of_variables(tmp_path: Path) -> None:
    prints = PRINTS.replace(METRICS, GET_RANK + FABRIC)
    assert preload(tmp_path, "import prints", prints) == ([], [], "5", "")


def test_a_value_that_only_ranks_have(tmp_path: Path) -> None:
    prints = PRINTS.replace(METRICS, 'only.rank = getattr(only, "rank", os.environ.get("LOCAL_RANK"))')
    assert preload(tmp_path, "import prints", prints) == ([], [], "'3'", "")


def test_another_module_hands_it_on(tmp_path: Path) -> None:
    user = f"import os\nimport prints\nonly = prints.only\n{METRICS}\n"
    assert preload(tmp_path, user) == ([], [], "3", "")


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    assert preload(tmp_path, "import prints", PRINTS.replace(METRICS, "only.rank = 9\n" + METRICS))[2:] == (
        "9",
        "",
    )


def test_what_an_import_sets_stays(tmp_path: Path) -> None:
    assert preload(tmp_path, "import prints\nprints.only.rank = 7") == ([], [], "7", "")


@pytest.mark.parametrize(
    "use",
    [
        "prints.say('hello')",
        "IS_FIRST = only.rank == 0",
        "IS_FIRST = 0 == only.rank",
        "IS_FIRST = only.rank in (0, 1)",
        "IS_FIRST = not only.rank",
        "NUMBER = int(only.rank)",
        "NUMBER = only.rank + 1",
        "NUMBER = 1 - only.rank",
        "NAME = f'{only.rank}.log'",
        "NAME = '%d.log' % only.rank",
        "NAME = str(only.rank)",
        "LOGS = [None] * 4\nLOGS[only.rank] = 1",
        "NUMBERS = list(range(only.rank))",
        "IS_NUMBER = isinstance(only.rank, int)",
        "BITS = only.rank.bit_length()",
        "BY_RANK = {only.rank: 1}",
        "import json\nTEXT = json.dumps(only.rank)",
        "import pickle\nDATA = pickle.dumps(only.rank)",
        "import copy\nCOPY = copy.deepcopy(only.rank)",
        "import math\nROOT = math.sqrt(only.rank)",
        "print(only.rank)",
    ],
)
def test_a_use_is_seen(tmp_path: Path, use: str) -> None:
    reads, used, _, _ = preload(tmp_path, f"import prints\nfrom prints import only\n{use}\n")
    assert (reads, used) == ([], [["prints", "LOCAL_RANK"]])


@pytest.mark.parametrize(
    "keep",
    [
        "RANK = only.rank",
        "RANKS = [only.rank]",
        "def log(rank=only.rank):\n    pass",
        "def make(rank):\n    return lambda: rank\nlog = make(only.rank)",
        "class Logger:\n    rank = only.rank",
        "import functools\nlog = functools.wraps(only)(lambda: 0)",
        "SETTINGS = dict(vars(only))",
        "import functools\nlog = functools.partial(print, only.rank)",
    ],
)
def test_what_is_kept_elsewhere_is_seen(tmp_path: Path, keep: str) -> None:
    reads, used, _, failed = preload(tmp_path, f"import prints\nfrom prints import only\n{keep}\n")
    assert (reads, used, failed) == ([], [["prints", "LOCAL_RANK"]], "")


@pytest.mark.parametrize("line", ["RANK = only.rank", "IS_FIRST = only.rank == 0"])
def test_the_module_uses_it_at_once(tmp_path: Path, line: str) -> None:
    prints = PRINTS.replace(METRICS, f"{METRICS}\n{line}")
    assert preload(tmp_path, "import prints", prints)[:2] == ([], [["prints", "LOCAL_RANK"]])


def test_of_the_last_statement_of_a_module(tmp_path: Path) -> None:
    prints = "import os\ndef only():\n    pass\n" + METRICS
    assert preload(tmp_path, "from prints import only\nRANK = only.rank", prints)[1] == [["prints", "LOCAL_RANK"]]


def test_other_reads_of_the_module_are_told(tmp_path: Path) -> None:
    prints = PRINTS + "\nWORLD = os.environ.get('WORLD_SIZE')\n"
    (read,) = preload(tmp_path, "import prints", prints)[0]
    assert read == ["prints", "WORLD_SIZE", prints.splitlines().index("WORLD = os.environ.get('WORLD_SIZE')") + 1]


@pytest.mark.parametrize("name", ["int", "getattr"])
def test_a_name_that_the_module_has_made_its_own(tmp_path: Path, name: str) -> None:
    prints = f"import builtins\n{name} = builtins.{name}\n" + PRINTS
    assert len(preload(tmp_path, "import prints", prints)[0]) == 1


def test_a_value_that_all_share(tmp_path: Path) -> None:
    """Who compares None by `is` is not seen."""
    prints = PRINTS.replace("int(os.environ.get(", "os.environ.get('X') and int(os.environ.get(")
    prints = prints.replace('"LOCAL_RANK", 0)))', '"LOCAL_RANK", 0)) or os.environ.get("RANK") and None)')
    assert len(preload(tmp_path, "import prints", prints)[0]) == 1


def test_what_is_executed_is_not_what_the_file_says(tmp_path: Path) -> None:
    source = tmp_path / "prints.py"
    source.write_text(PRINTS.replace('"LOCAL_RANK", 0', '"RANK", 0'))
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_text(PRINTS)
    reads, _, _, _ = preload(tmp_path, "import prints")
    assert [read[:2] for read in reads] == [["prints", "RANK"]]  # type: ignore[index]


def test_somebody_traces(tmp_path: Path) -> None:
    prints = PRINTS.replace(METRICS, f"import sys\nsys.settrace(print)\n{METRICS}\nsys.settrace(None)")
    assert len(preload(tmp_path, "import prints", prints)[0]) == 1
