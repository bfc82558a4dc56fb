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

from launcher.in_rank import import_watch, rank_values

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
        GET_RANK.replace("return None", "for os.environ in [()]:\n        pass") + FABRIC,
        'only.rank = getattr(only, "rank", os.environ[pick()])',
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
if not used:
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


def preload(
    directory: Path, user: str, prints: str = PRINTS, program: str = PRELOADING, stderr: str | None = None
) -> tuple[list[object], list[object], str, str]:
    """Who reads variables, who uses what comes of them, and what a rank has in the end."""
    (directory / "user.py").write_text(textwrap.dedent(user))
    if not (directory / "prints.py").exists():
        (directory / "prints.py").write_text(prints)
    environ = {name: value for name, value in os.environ.items() if name not in import_watch.PER_RANK}
    words = [sys.executable, "-c", program, import_watch.__file__, rank_values.__file__]
    ended = subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert stderr is None or ended.stderr == stderr
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


@pytest.mark.parametrize("value", ['os.environ.get("LOCAL_RANK")', 'os.environ.get("LOCAL_RANK", "0")'])
def test_only_numbers_are_understood(tmp_path: Path, value: str) -> None:
    """Of None there is but one, and C tells texts from what only behaves like one."""
    prints = PRINTS.replace(METRICS, f'only.rank = getattr(only, "rank", {value})')
    assert len(preload(tmp_path, "import prints", prints)[0]) == 1


def test_another_module_hands_it_on(tmp_path: Path) -> None:
    user = f"import os\nimport prints\nonly = prints.only\n{METRICS}\n"
    assert preload(tmp_path, user) == ([], [], "3", "")


@pytest.mark.parametrize("other", ["RANK", "LOCAL_RANK"])
def test_two_modules_make_the_same_attribute(tmp_path: Path, other: str) -> None:
    """If not in the same way, it decides which of them the script imports first."""
    line = METRICS.replace("LOCAL_RANK", other)
    user = f"import os\nfrom prints import only\n{line}\n"
    reads, used, value, _ = preload(tmp_path, user)
    if other == "LOCAL_RANK":
        assert (reads, used, value) == ([], [], "3")
    else:
        assert reads == [["user", "RANK", 3]]
        assert used == [["prints", "LOCAL_RANK"]]


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
        "DATA = bytes(only.rank)",
        "import struct\nDATA = struct.pack('i', only.rank)",
        "import time\ntime.sleep(only.rank)",
        "TEXT = 'abc' * only.rank",
        "TEXT = 'abc'[only.rank:]",
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
        "RANK = only.rank\nonly.rank = 7",
        "RANK = only.rank\ndel only.rank",
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


def test_other_reads_of_the_module_are_reported(tmp_path: Path) -> None:
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


def test_the_same_line_of_other_code(tmp_path: Path) -> None:
    """Executed with the module's names."""
    line = PRINTS.splitlines().index(METRICS)
    source = "\n" * line + "IS_FIRST = os.environ.get('LOCAL_RANK') is None"
    prints = f"{PRINTS}\nexec({source!r}, globals())\n"
    assert [read[:2] for read in preload(tmp_path, "import prints", prints)[0]] == [["prints", "LOCAL_RANK"]]  # type: ignore[index]


@pytest.mark.parametrize("line", ["del os", "int = float", "def _get_rank():\n    return 7", "_get_rank = len"])
def test_what_it_is_made_by_is_another_thing_later(tmp_path: Path, line: str) -> None:
    prints = f"{PRINTS.replace(METRICS, GET_RANK + FABRIC)}\n{line}\n"
    reads, used, _, _ = preload(tmp_path, "import prints", prints)
    assert reads or used


def test_a_variable_that_is_no_ranks_makes_it_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_RANKS", "1")
    get_rank = GET_RANK.replace(
        "if rank is not None:", "if rank is not None and os.environ.get('NO_RANKS') is None:"
    )
    prints = PRINTS.replace(METRICS, get_rank + 'only.rank = getattr(only, "rank", _get_rank())')
    reads = preload(tmp_path, "import prints", prints)[0]
    assert [read[:2] for read in reads] == [["prints", "RANK"], ["prints", "LOCAL_RANK"]]  # type: ignore[index]


@pytest.mark.parametrize("owner", ["class only:\n    pass", "import types\nonly = types.SimpleNamespace()"])
def test_an_owner_that_is_no_function(tmp_path: Path, owner: str) -> None:
    assert len(preload(tmp_path, "import prints", f"import os\n{owner}\n{METRICS}\n")[0]) == 1


def test_nothing_is_reported_twice(tmp_path: Path) -> None:
    """A module that is compiled already does not warn; what a preload prints ends it."""
    prints = PRINTS + "\nIS_ONE = 1 is 1\n"
    (tmp_path / "prints.py").write_text(prints)
    compiling = [sys.executable, "-W", "ignore", "-m", "py_compile", "prints.py"]
    subprocess.run(compiling, cwd=tmp_path, check=True)
    assert preload(tmp_path, "import prints", prints, stderr="")[:2] == ([], [])


def test_a_use_after_the_look_ends_the_rank(tmp_path: Path) -> None:
    """By what runs in a fork."""
    program = PRELOADING.replace("if not used:", "bool(sys.modules['prints'].only.rank)\nif not used:")
    with pytest.raises(AssertionError, match="prints has used LOCAL_RANK"):
        preload(tmp_path, "import prints", program=program)


def test_somebody_traces(tmp_path: Path) -> None:
    prints = PRINTS.replace(METRICS, f"import sys\nsys.settrace(print)\n{METRICS}\nsys.settrace(None)")
    assert len(preload(tmp_path, "import prints", prints)[0]) == 1
