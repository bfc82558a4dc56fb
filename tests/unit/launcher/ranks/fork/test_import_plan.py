"""Which imports may come before the script: tables of what one start has shown, and of what texts say."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from launcher.ranks.fork.import_plan import MAIN, Module, Patch, RankRead, StateUse, WatchNotes, decide, parse
from launcher.ranks.fork.import_texts import find_patches, uses_at_import
from launcher.ranks.fork.script_text import find_doubt

LIB = "/env/lib/python3.12/site-packages"
NEEDS = {"b": {"a"}, "c": {"b"}}  # d stands alone


def watched(*noted: StateUse) -> WatchNotes:
    uses = [use for use in noted if use.by]
    modules = {MAIN: Module(0, "", 0, "/home/train.py")}
    for tick, name in enumerate("abcd", 1):
        modules[name] = Module(tick * 10, MAIN, tick, f"{LIB}/{name}.py")
    modules["e"] = Module(50, MAIN, 5, f"{LIB}/e.cpython-312-x86_64-linux-gnu.so")
    return WatchNotes(modules, NEEDS, uses, {use.what: use.first for use in noted if not use.by})


def change(what: str, tick: int = 5, by: str = MAIN) -> StateUse:
    return StateUse(tick, tick, by, True, what)


def read(what: str, by: str, tick: int = 15) -> StateUse:
    return StateUse(tick, tick, by, False, what)


def back(what: str, since: int) -> StateUse:
    """It is as at first again."""
    return StateUse(since, since, "", True, what)


def mentioned(*names: str):  # type: ignore[no-untyped-def]
    def mention(modules: Sequence[str], _names: tuple[str, ...]) -> Collection[str]:
        return [name for name in modules if name in names]

    return mention


@pytest.mark.parametrize(
    ("uses", "mention", "patches", "kept"),
    [
        ((), (), (), "abcde"),
        ((read("env:X", "a"),), (), (), "abcde"),
        ((change("env:X"), read("env:X", "a")), (), (), "de"),
        ((change("env:X"), read("env:Y", "a")), (), (), "abcde"),
        ((change("env:X", 20), read("env:X", "a")), (), (), "abcde"),
        ((change("env:X"), read("env:*", "d", 45)), (), (), "abce"),
        ((change("env:X"),), ("e",), (), "abcd"),  # native code names it
        ((change("env:OMP_NUM_THREADS"),), (), (), "abcd"),
        ((change("env:PYTORCH_X"),), (), (), "abcde"),  # none of torch's
        ((read("env:*", "a"), read("env:RANK", "a")), (), (), "abcde"),  # a copy of all
        ((read("env:RANK", "b", 25),), (), (), "ade"),
        ((read("env:LOCAL_RANK", "d", 45),), (), (), "abce"),
        ((change("cwd", 35),), (), (), "abc"),
        ((change("file:/home/x"), read("file:/home/x", "a")), (), (), "de"),
        ((change("file:/home/x"), read("file:/home", "d", 45)), (), (), "abce"),
        ((change("file:/home"), read("file:/home/x", "d", 45)), (), (), "abce"),
        ((change("file:/home/y"), read("file:/home/x", "a")), (), (), "abcde"),
        ((change("process"), read("file:/home/x", "a")), (), (), "de"),
        ((change("argv"),), (), (), "abcde"),
        ((change("argv"),), ("c",), (), "abde"),
        ((change("warnings"),), ("d",), (), "abce"),
        ((change("builtins", 25),), (), (), "ab"),
        ((change("finders", 35),), (), (), "abc"),
        ((change("random"), change("random", 17, "a")), (), (), "de"),
        ((change("random"),), (), (), "abcde"),
        ((change("logger:a"), change("logger:a", 17, "a")), (), (), "de"),
        ((change("logger:root"), change("logger:a", 17, "a")), (), (), "abcde"),
        # What is left out changes something before others, too.
        ((read("env:RANK", "a"), change("env:X", 17, "a"), read("env:X", "d", 45)), (), (), "e"),
        # Changed, and changed back in tick 8; or in 32, between the imports of c and d.
        ((change("env:X"), read("env:X", "a"), back("env:X", 8)), (), (), "abcde"),
        ((change("env:X"), read("env:X", "b", 25), read("env:X", "d", 45), back("env:X", 32)), (), (), "ade"),
        ((change("env:X"), read("env:*", "d", 45), back("env:X", 32)), (), (), "abcde"),
        ((change("env:OMP_X"), back("env:OMP_X", 32)), (), (), "abcde"),
        ((change("env:OMP_X"), back("env:OMP_X", 60)), (), (), "abcd"),
        ((change("cwd", 15), back("cwd", 25)), (), (), "ade"),
        # What is preloaded changes it, too: before the script, others would see that.
        (
            (change("env:X", 17, "a"), change("env:X", 18), back("env:X", 18), read("env:X", "d", 45)),
            (),
            (),
            "abce",
        ),
        ((), ("c",), (Patch(MAIN, 2, "b", "value"),), "abde"),
        ((), (), (Patch(MAIN, 2, "b", "value"),), "abcde"),
        ((), ("c",), (Patch(MAIN, 9, "b", "value"),), "abcde"),  # after the import of c
        ((), (), (Patch(MAIN, 2, "*", ""),), "a"),
    ],
)
def test_what_may_come_before(
    uses: tuple[StateUse, ...], mention: tuple[str, ...], patches: tuple[Patch, ...], kept: str
) -> None:
    plan = decide(watched(*uses), list("abcde"), patches, mentioned(*mention))
    assert "".join(plan.modules) == kept
    assert set(plan.left_out) == set("abcde") - set(kept)
    assert any(plan.left_out.values()) or kept == "abcde"


@pytest.mark.parametrize(
    ("reads", "again", "uses", "kept"),
    [
        ("ad", "ad", (), "abcde"),
        ("ad", "d", (), "e"),  # a is left out, with what imports it; it may have set what d sets
        ("ad", "a", (), "abce"),  # d comes later
        ("ad", "ad", (change("env:X"), read("env:X", "a")), "e"),
        ("ad", "ad", (change("env:X", 35), read("env:X", "d", 45)), "abce"),
    ],
)
def test_reads_of_the_rank_that_ranks_make_again(
    reads: str, again: str, uses: tuple[StateUse, ...], kept: str
) -> None:
    found = watched(*(read("env:RANK", name) for name in reads), *uses)
    found = found._replace(rank_reads=[RankRead(name, "RANK", 3) for name in reads])
    plan = decide(found, list("abcde"), (), mentioned(), [RankRead(name, "RANK", 3) for name in again])
    assert "".join(plan.modules) == kept


def test_another_line_of_the_module_reads_it_too() -> None:
    found = watched(read("env:RANK", "a"))._replace(
        rank_reads=[RankRead("a", "RANK", 3), RankRead("a", "RANK", 9)]
    )
    assert "".join(decide(found, list("abcde"), (), mentioned(), [RankRead("a", "RANK", 3)]).modules) == "de"


def test_lines_of_reads_are_parsed() -> None:
    text = "begun\t0\t\t0\t__main__\t/t.py\nbegun\t1\t__main__\t1\ta\t/a.py\nrank\t1\tRANK\t39\nend\n"
    found = parse(text)
    assert found is not None and found.rank_reads == [RankRead("a", "RANK", 39)]


def test_the_standard_library_does_not_look_at_the_working_directory() -> None:
    """So that hydra's or another script's chdir before `import torch` does not cost all forks."""
    places = {
        "_ctypes": "/env/lib/python3.12/lib-dynload/_ctypes.cpython-312-x86_64-linux-gnu.so",
        "ctypes": "/env/lib/python3.12/ctypes/__init__.py",
        "typing_extensions": f"{LIB}/typing_extensions.py",
        "torch": f"{LIB}/torch/__init__.py",
        "other": f"{LIB}/other.py",
        "mine": "/home/mine.py",
    }
    modules = {name: Module(tick, MAIN, 0, path) for tick, (name, path) in enumerate(places.items(), 10)}
    needs = {"ctypes": {"_ctypes"}, "torch": {"ctypes", "typing_extensions"}}
    found = WatchNotes({MAIN: Module(0, "", 0, "/home/train.py"), **modules}, needs, [change("cwd")])
    plan = decide(found, list(places), (), mentioned())
    assert plan.modules == ("_ctypes", "ctypes", "typing_extensions", "torch")
    assert plan.changes == ("cwd",)


def test_multiprocessing_itself_has_no_start_method_fixed() -> None:
    """Its parts import get_context from each other, and call it later."""
    places = {"multiprocessing.pool": "/env/lib/python3.12/multiprocessing/pool.py", "other": f"{LIB}/other.py"}
    modules = {name: Module(tick, MAIN, 0, path) for tick, (name, path) in enumerate(places.items(), 10)}
    found = WatchNotes({MAIN: Module(0, "", 0, "/home/train.py"), **modules}, {}, [change("start method")])
    plan = decide(found, list(places), (), mentioned(*places))
    assert plan.modules == ("multiprocessing.pool",)


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import sys\nN = len(sys.argv)", True),
        ("from sys import argv", True),
        ("import sys\ndef f(): return sys.argv", False),
        ("import sys\ndef f(): return sys.argv\nN = f()", True),
        ("import sys\nclass C:\n    n = sys.argv", True),
        ("import sys\ndef f(n=sys.argv): pass", True),
        ("getattr(__import__('sys'), 'argv')", False),
        # As timeit, profile and torch.cuda._memory_viz, which also are programs.
        ("import sys\ndef main(): return sys.argv\nif __name__ == '__main__':\n    main()", False),
        ("import sys\nif '__main__' == __name__: print(sys.argv)\nelse: N = 1", False),
        ("import sys\nif __name__ == '__main__': N = 1\nelse: N = sys.argv", True),
        ("import sys\nif __name__ != '__main__': N = sys.argv", True),
        ("'argv", True),  # not to be parsed, and named
        ("argument = 1", False),
    ],
)
def test_what_an_import_uses(text: str, uses: bool) -> None:
    assert uses_at_import(text.encode(), ("sys.argv",)) == uses


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import lib\nlib.value = 1", [("lib", "value")]),
        ("import lib.part as p\np.value += 1", [("lib.part", "value")]),
        ("from lib import part\npart.value = 1", [("lib.part", "value")]),
        ("from lib import Kind\nKind.method = print", [("lib", "Kind")]),
        ("import lib\nsetattr(lib, 'value', 1)", [("lib", "value")]),
        ("import lib\nshort = lib.part\nshort.value = 1", [("lib.part", "value")]),
        ("import lib\nlib.table['x'] = 1", [("lib", "table")]),
        ("import sys\nsys.modules['other'] = None", [("other", "")]),
        ("import sys\nsys.modules[name] = None", [("*", "")]),
        ("from unittest import mock\nmock.patch('lib.part.value')", [("lib.part", "value")]),
        ("import os\nos.environ['X'] = '1'", []),
        ("class C:\n    def f(self): self.value = 1", []),
        ("import lib\nvalue = lib.value", []),
        ("x = (", [("*", "")]),
    ],
)
def test_what_a_file_changes_in_modules(text: str, found: list[tuple[str, str]]) -> None:
    patches = find_patches(
        text.encode() if text != "x = (" else b"setattr(", MAIN, {"lib", "lib.part", "os", "sys"}
    )
    assert [(patch.module, patch.name) for patch in patches] == found


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("import os, sys\nimport numpy as np\nimport torch", ""),
        ("import logging\nlog = logging.getLogger(__name__)\nimport torch", ""),
        ("def f():\n    anything()\nimport torch\nanything()", ""),
        ('import time\nMOMENTS = {"script": time.monotonic_ns()}\nimport torch', ""),
        ("import os, time\nprint(time.perf_counter_ns(), time.strftime('%H'), os.getpid())\nimport torch", ""),
        ("import os\nROOT = os.path.expanduser('~')\nfiles = os.listdir(ROOT)\nimport torch", ""),
        ("import sys\nsys.setrecursionlimit(9)\nimport torch", "calls sys.setrecursionlimit in line 2"),
        ("from importlib.util import find_spec\nfind_spec('a.b')\nimport torch", "calls find_spec in line 2"),
        ("import os\nos.umask(7)\nimport torch", "calls os.umask in line 2"),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", "calls load_dotenv in line 2"),
        ("import config\nimport torch", "imports config in line 1"),
        ("from . import config\nimport torch", "imports from its own package in line 1"),
        ("import os\nos.environ[name] = '1'\nimport torch", "changes os.environ in line 2"),
        ("import os\nos.chdir('/')\nimport torch", "calls os.chdir in line 2"),
        ("import sys\nsys.path.append('x')\nimport torch", "calls sys.path.append in line 2"),
        ("import lightning\nprepare()", ""),
        ("def main():\n    import torch\nmain()", "calls main in line 3"),
    ],
)
def test_what_a_script_does_before_torch(text: str, doubt: str) -> None:
    assert find_doubt(text.encode(), {"torch"}, {"os", "sys", "logging", "time", "importlib"}) == doubt


@pytest.mark.parametrize("name", ["start_train.py", "fork_rank.py", "compile_rank.py"])
def test_scripts_of_the_bench_leave_no_doubt(name: str) -> None:
    """Else their figures would be those of exec'd ranks."""
    bench = Path(__file__).parents[5] / "bench"
    assert find_doubt((bench / name).read_bytes(), {"torch"}, sys.stdlib_module_names) == ""
