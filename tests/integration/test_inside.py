"""launcher/in_rank/bootstrap.py against the plain interpreter: a script run both ways must not be able to tell."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from launcher.monitor.samples.stacks import Thread, find_main, parse_stacks
from launcher.ranks.command import RUN_PATH
from launcher.ranks.stats_page import (
    PAGE_BYTES,
    StatsPage,
    StatsPageFile,
    StatsPages,
    heartbeat_event,
    read_exit_status,
    read_heartbeats,
    read_page,
)
from tests.support import Programs, Run, wait_until

INSIDE = os.path.abspath("launcher/in_rank/bootstrap.py")
IDENTITY = ("run", "node-a", "3", "1", "")
NAME = "_bootseer_rank"


def _find_pythons() -> dict[str, str]:
    """One interpreter of each version at hand, by name; our own is "own"."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = {"own": sys.executable}
    # Links of pyenv are scripts, which take long and may have no interpreter.
    for path in [
        *sorted(glob.glob(f"{root}/versions/3.*/bin/python")),
        *(shutil.which(f"python3.{minor}") or "" for minor in range(4, 20)),
    ]:
        if path and not path.startswith(f"{root}/shims/"):
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            run = subprocess.run([path, "-E", "-S", "-c", code], capture_output=True, text=True)
            if run.returncode == 0:
                found.setdefault(run.stdout.strip(), path)
    found.pop("{}.{}".format(*sys.version_info[:2]), None)
    return found


PYTHONS = _find_pythons()
SUPPORTED = [name for name in PYTHONS if name == "own" or int(name.split(".")[1]) >= 8]
EACH = [name if name == "own" else pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED]
OLDER = [name for name in PYTHONS if name not in SUPPORTED]

Pair = Callable[..., tuple[Run, Run]]


@pytest.fixture
def both(program: Programs, tmp_path: Path) -> Pair:
    """Runs a target plainly and through bootstrap.py, from the folder of the test."""

    def run(
        target: str,
        *args: str,
        mode: str = "script",
        python: str = "own",
        events: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        inside: str = INSIDE,
        deadline_s: float = 60.0,
    ) -> tuple[Run, Run]:
        interpreter = PYTHONS[python]
        plain = {"script": [], "module": ["-m"]}[mode]
        where = cwd or os.fspath(tmp_path)
        runs = [
            program(interpreter, "-u", *words, target, *args, env=env, cwd=where, deadline_s=deadline_s)
            for words in (plain, [inside, mode, events, *IDENTITY])
        ]
        return runs[0], runs[1]

    return run


def check_same(pair: tuple[Run, Run]) -> None:
    """Exit status and both outputs are the same."""
    plain, ours = (_normal(run) for run in pair)
    assert ours == plain


def _normal(run: Run) -> tuple[int, list[str], list[str]]:
    address = re.compile(r"0x[0-9a-f]+")
    return run.status, address.sub("0x", run.stdout).splitlines(), address.sub("0x", run.stderr).splitlines()


# ---- everything a script can look at -------------------------------------------------------------------------

PROBE = """
import json, os, sys
names = {name: repr(value) if name not in ("__loader__", "__builtins__", "__spec__") else type(value).__name__
         for name, value in globals().items()}
skipped = ("last_traceback", "stdout", "stderr", "__stdout__", "__stderr__", "stdin", "__stdin__",
           "modules", "displayhook", "__displayhook__", "path_hooks", "meta_path", "path_importer_cache",
           "flags", "orig_argv")
found = {
    "names": list(names.items())[:-3],
    "loader": [getattr(__loader__, "name", None), getattr(__loader__, "path", None)],
    "spec": None if __spec__ is None else [__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached],
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "builtins": __builtins__ is sys.modules["builtins"],
    "modules": list(sys.modules),
    "environ": dict(os.environ),
    "flags": str(sys.flags),
    "orig_argv": getattr(sys, "orig_argv", None),
    "finders": [str(finder) for finder in sys.meta_path],
    "importers": list(sys.path_importer_cache),
    "sys": {name: repr(sorted(value) if isinstance(value, frozenset) else value)
            for name, value in vars(sys).items() if name not in skipped},
    "cwd": os.getcwd(),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "recursion": sys.getrecursionlimit(),
    "frame": [sys._getframe().f_code.co_filename, sys._getframe().f_code.co_name, sys._getframe().f_lineno],
    "exc_info": sys.exc_info(),
    "umask": open("/proc/self/status").read().split("Umask:")[1].split()[0],
    "signals": [line for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC"))],
    "threads": len(os.listdir("/proc/self/task")),
}
for name in ("stdin", "stdout", "stderr"):
    stream = getattr(sys, name)
    found[name] = [str(type(stream)), stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(),
                   stream.line_buffering, stream.write_through, stream.newlines, stream.isatty(),
                   stream.seekable(), stream.buffer.name, stream.buffer.mode, type(stream.buffer).__name__,
                   getattr(stream.buffer, "closefd", None), stream is getattr(sys, "__" + name + "__"),
                   repr(stream)]
print(json.dumps(found, default=repr))
"""


def check_same_probe(pair: tuple[Run, Run]) -> None:
    address = re.compile(r"0x[0-9a-f]+")
    plain, ours = (json.loads(address.sub("0x", run.stdout)) for run in pair)
    ours["modules"].remove(NAME)
    assert ours.keys() == plain.keys()
    for key in plain:
        assert ours[key] == plain[key], key


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return os.fspath(path)


TARGETS = {
    "relative": ("script", "probe.py"),
    "dotted": ("script", "./probe.py"),
    "through a link": ("script", "link/../link.py"),
    "absolute": ("script", "{tmp}/sub/../probe.py"),
    "folder": ("script", "folder"),
    "archive": ("script", "archive.zip"),
    "compiled": ("script", "compiled.pyc"),
    "module": ("module", "probe"),
    "package": ("module", "package"),
    "module in a package": ("module", "package.inner"),
}


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    for name in ("probe.py", "folder/__main__.py", "package/__main__.py", "package/inner.py", "sub/real.py"):
        write(tmp_path / name, PROBE)
    write(tmp_path / "package/__init__.py", "")
    (tmp_path / "link.py").symlink_to("sub/real.py")
    (tmp_path / "link").mkdir()
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", PROBE)
    return tmp_path


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("python", EACH)
def test_a_script_sees_what_the_plain_interpreter_shows(
    both: Pair, probes: Path, python: str, target: str
) -> None:
    mode, path = TARGETS[target]
    if target == "compiled":
        code = "import py_compile; py_compile.compile('probe.py', 'compiled.pyc')"
        subprocess.run([PYTHONS[python], "-c", code], cwd=probes, check=True)
    pair = both(path.format(tmp=probes), "--flag", "", "a b", "é", mode=mode, python=python)
    check_same_probe(pair)


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONSAFEPATH": "1"},
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONIOENCODING": "latin-1:replace"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONPATH": "/nowhere"},
        {"PYTHONFAULTHANDLER": "1"},
        {"PYTHONWARNINGS": "error"},
    ],
    ids=lambda environ: next(iter(environ)),
)
@pytest.mark.parametrize("target", ["relative", "folder", "module"])
def test_variables_of_the_interpreter_mean_the_same(
    both: Pair, probes: Path, environ: dict[str, str], target: str
) -> None:
    mode, path = TARGETS[target]
    env = dict(environ)
    if "PYTHONSAFEPATH" in environ:
        env["PYTHONPATH"] = str(probes)  # else nobody finds the module
    check_same_probe(both(path, mode=mode, env=env))


def test_the_compiled_file_does_the_same(both: Pair, probes: Path, tmp_path: Path) -> None:
    compiled = os.fspath(tmp_path / "bootstrap.pyc")
    subprocess.run(
        [sys.executable, "-c", f"import py_compile; py_compile.compile({INSIDE!r}, {compiled!r})"], check=True
    )
    check_same_probe(both("probe.py", inside=compiled))
    write(tmp_path / "fails.py", "1/0")
    check_same(both("fails.py", inside=compiled))


@pytest.mark.parametrize("python", OLDER)
def test_an_older_interpreter_runs_the_script_bare(both: Pair, probes: Path, python: str) -> None:
    write(probes / "small.py", "import sys; print(sys.argv, sys.path, __file__, sorted(sys.modules)); sys.exit(3)")
    pair = both("small.py", "a", python=python)
    assert pair[0].status == 3
    check_same(pair)
    check_same(both("small", "a", python=python, mode="module"))


# ---- endings -------------------------------------------------------------------------------------------------

ENDINGS = {
    "last statement": "print('x', end='')",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('some text')",
    "exit none": "raise SystemExit",
    "exit true": "import sys; sys.exit(True)",
    "exit tuple": "import sys; sys.exit((1, 2))",
    "exit large": "import sys; sys.exit(2**40)",
    "exit negative": "import sys; sys.exit(-1)",
    "exception": "def f():\n    raise ValueError('x')\nf()",
    "in a library": "import json; json.loads('{')",
    "chain": "try:\n    1/0\nexcept Exception as e:\n    raise KeyError('k') from e",
    "context": "try:\n    1/0\nfinally:\n    [][1]",
    "without context": "try:\n    1/0\nexcept Exception:\n    raise KeyError('k') from None",
    "group": "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])",
    "note": "e = ValueError(1); e.add_note('note'); raise e",
    "suggestion": "value = 1\nvalu",
    "assertion": "assert 1 == 2, 'no'",
    "generator exit": "raise GeneratorExit",
    "odd exception": "class E(BaseException):\n    def __str__(self): raise ValueError\nraise E",
    "reraised later": "try:\n    1/0\nexcept Exception as e:\n    kept = e\ndef f(): raise kept\nf()",
    "caught": "import traceback\ntry:\n    1/0\nexcept Exception:\n    traceback.print_exc()",
    "import fails": "import nothing_of_that_name",
    "hook": "import sys\ndef hook(*a): print('hook', a[0], a[1], a[2].tb_next, a[1].__traceback__ is a[2], "
    "sys.last_traceback is a[2], sys.last_value is a[1], sys.excepthook is hook, __file__)\n"
    "sys.excepthook = hook\n1/0",
    "hook fails": "import sys\ndef hook(*a): raise KeyError('in hook')\nsys.excepthook = hook\n1/0",
    "hook exits": "import sys\ndef hook(*a): sys.exit(7)\nsys.excepthook = hook\n1/0",
    "hook is none": "import sys\nsys.excepthook = None\n1/0",
    "no hook": "import sys\ndel sys.excepthook\n1/0",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt with text": "raise KeyboardInterrupt('text')",
    "kind of interrupt": "class K(KeyboardInterrupt): pass\nraise K",
    "SIGINT": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "SIGTERM": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)",
    "abort": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "_exit": "import os; print('x', end=''); os._exit(5)",
    "thread goes on": "import threading, time\ndef f():\n    time.sleep(.1); print('thread')\n"
    "threading.Thread(target=f).start(); print('main')",
    "thread fails": "import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()",
    "atexit": "import atexit, sys\natexit.register(lambda: print('atexit', '__file__' in globals(), "
    "'__cached__' in globals(), sys.exc_info(), sys.excepthook is sys.__excepthook__))",
    "atexit after exception": "import atexit, sys\natexit.register(lambda: print('__file__' in globals(), "
    "sys.excepthook is sys.__excepthook__, hasattr(sys, 'last_value')))\n1/0",
    "atexit after exit": "import atexit, sys\n"
    "atexit.register(lambda: print('__file__' in globals()))\nsys.exit(3)",
    "atexit fails": "import atexit\natexit.register(lambda: 1/0)",
    "del at the end": "class C:\n    def __del__(self): print('del', __name__, C)\nc = C()",
    "del fails": "class C:\n    def __del__(self): 1/0\nc = C()",
    "main removed": "import sys\ndel sys.modules['__main__']",
    "stdout closed": "import sys\nsys.stdout.close()",
    "warning": "import warnings\ndef f():\n    warnings.warn('look')\nf()\nwarnings.warn('here')\n"
    "warnings.warn('old', DeprecationWarning)",
    "warning of the compiler": "x = 1\nif x is 1:\n    print('\\d')",
    "syntax error": "print('x'\n\ny = 1",
    "indentation error": "if 1:\nprint(2)",
    "null byte": "print(1)\n\0\n",
    "late syntax error": "print(1)\nreturn 3",
    "docstring": "'''Doc.'''\nprint(__doc__, __name__, __file__)",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future": "from __future__ import annotations\nx: nothing = 1\nprint(__annotations__)",
    "star import": "from os.path import *\nprint(join('a', 'b'), sorted(globals())[:6])",
    "recursion": "import sys\nsys.setrecursionlimit(80)\ndef f(): f()\n"
    "try:\n    f()\nexcept RecursionError as e:\n    print(e)",
    "faulthandler": "import faulthandler; faulthandler.enable(); print(faulthandler.is_enabled())",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("mode", ["script", "module"])
def test_endings(both: Pair, tmp_path: Path, ending: str, mode: str) -> None:
    write(tmp_path / "program.py", ENDINGS[ending])
    target = "program.py" if mode == "script" else "program"
    # A compiled module left by the first of the two runs would keep the compiler's warnings from the second.
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    check_same(both(target, mode=mode, events=str(tmp_path / "events"), env=env))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("python", [name for name in SUPPORTED if name != "own"])
def test_endings_in_other_pythons(both: Pair, tmp_path: Path, ending: str, python: str) -> None:
    write(tmp_path / "program.py", ENDINGS[ending])
    check_same(both("program.py", python=python, events=str(tmp_path / "events")))


@pytest.mark.parametrize(
    ("mode", "target"),
    [
        ("script", "missing.py"),
        ("script", "empty"),
        ("script", "missing/x.py"),
        ("script", "secret.py"),
        ("script", "bad.pyc"),
        ("script", "broken.zip"),
        ("module", "missing"),
        ("module", "empty"),
        ("module", "json.missing"),
        ("module", "broken"),
        ("module", "..x"),
        ("module", ""),
        ("module", "sys"),
    ],
)
def test_what_cannot_be_run_is_said_as_the_interpreter_says_it(
    both: Pair, tmp_path: Path, mode: str, target: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.pyc").write_bytes(b"not compiled")
    (tmp_path / "broken.zip").write_bytes(b"PK\3\4")
    (tmp_path / "secret.py").symlink_to("secret.py")
    write(tmp_path / "broken.py", "import nothing_of_that_name")
    pair = both(target, "x", mode=mode)
    assert pair[0].status != 0
    check_same(pair)


@pytest.mark.parametrize(
    "source",
    [
        b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\nraise ValueError('\xe9')",
        b"\xef\xbb\xbfprint(ascii('\xc3\xa9'))",
        b"#!/usr/bin/env python\r\nprint(1)\r\nx = '''a\r\nb'''\r\nprint(repr(x))\r\n1/0\r\n",
        b"print(ascii('\xe9'))",
        b"# coding: nothing-of-that-name\nprint(1)",
        b"\xef\xbb\xbf# coding: latin-1\nprint(1)",
        b"# coding: utf-16\nprint(1)",
        b"",
        b"\x0cprint(1)",
        b"print(1)\\",
        b"print(1) # no newline",
    ],
)
def test_sources_of_all_kinds(both: Pair, tmp_path: Path, source: bytes) -> None:
    (tmp_path / "program.py").write_bytes(source)
    check_same(both("program.py"))


def test_a_script_from_a_pipe(program: Programs, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    running = program.start(sys.executable, "-u", INSIDE, "script", "", *IDENTITY, str(fifo))
    with fifo.open("wb") as file:
        file.write(b"import sys; print(__file__); sys.exit(3)")
    run = running.wait()
    assert (run.status, run.stdout, run.stderr) == (3, f"{fifo}\n", "")


# ---- libraries that look at __main__ -------------------------------------------------------------------------

LIBRARIES = {
    "pickle": """
        import pickle
        class C:
            def __eq__(self, other): return type(other) is C
        def f(): pass
        assert pickle.loads(pickle.dumps(C())) == C() and pickle.loads(pickle.dumps(f)) is f
        print(pickle.dumps(C()))
        """,
    "inspect": """
        import inspect, sys
        def f(a: int) -> str:
            "doc"
            return 'x'
        class C:
            y = 1
        print(inspect.getsource(f), inspect.getsource(C), inspect.getfile(C), inspect.getsourcefile(f))
        print(inspect.getsource(sys.modules['__main__']), inspect.getmodule(f), inspect.signature(f))
        """,
    "doctest": """
        def f():
            '''
            >>> f()
            2
            '''
            return 1
        import doctest
        print(doctest.testmod())
        """,
    "dataclasses": """
        import dataclasses, enum, typing, collections
        @dataclasses.dataclass
        class D:
            x: int = 1
        E = enum.Enum('E', 'a b')
        N = collections.namedtuple('N', 'x')
        class T(typing.NamedTuple):
            x: int
        print(D(), E.a, N(1), T(2), D.__module__, E.__module__, N.__module__, typing.get_type_hints(D))
        """,
    "unittest": """
        import time, unittest, sys
        time.perf_counter = time.time = lambda: 0.0  # it says how long it took
        class T(unittest.TestCase):
            def test(self): self.assertEqual(sys.argv[0], __file__.rpartition('/')[2])
        unittest.main(verbosity=0, exit=False)
        """,
    "pdb": """
        import pdb
        x = 1
        pdb.set_trace()
        print('after')
        """,
    "logging": """
        import logging
        logging.basicConfig(format='%(pathname)s %(lineno)d %(funcName)s %(module)s %(message)s')
        logging.warning('x')
        logging.getLogger(__name__).error('y', exc_info=ZeroDivisionError('z'))
        """,
    "subprocess": """
        import os, subprocess, sys
        code = "import os, sys; print(sorted(os.environ), sorted(sys.modules), sys.path[1:], sys.argv)"
        print(subprocess.run([sys.executable, '-c', code], stdout=subprocess.PIPE).stdout.decode())
        """,
    "reload": """
        import importlib, json, sys
        importlib.reload(json)
        try:
            importlib.reload(sys.modules[__name__])
        except Exception as error:
            print(repr(error))
        """,
    "runpy": """
        import runpy, sys
        print(sorted(runpy.run_path(__file__, run_name='other')) if __name__ == '__main__' else __name__)
        """,
    "fork": """
        import os, sys
        if os.fork() == 0:
            print('child')
            sys.exit(4)
        print(os.wait()[1])
        """,
    "exec again": """
        import os, sys
        if len(sys.argv) == 1:
            os.execv(sys.executable, getattr(sys, 'orig_argv', [sys.executable, __file__]) + ['again'])
        print(sys.argv)
        """,
    "linecache": """
        import linecache, tokenize
        print(linecache.getline(__file__, 2), len(linecache.cache))
        """,
    "own modules": """
        import launcher, bootseer, bench, bootstrap, in_rank, ranks
        print(launcher.MINE, bootseer.MINE, bench.MINE, bootstrap.MINE, in_rank.MINE, ranks.MINE)
        """,
    "pkgutil": """
        import pkgutil, sys
        print(pkgutil.get_data('json', '__init__.py')[:20], [str(i)[:30] for i in pkgutil.iter_importers()])
        print(__import__('importlib.metadata'))
        """,
    "tracemalloc": """
        import tracemalloc
        tracemalloc.start()
        x = bytearray(10000)
        print(tracemalloc.get_object_traceback(x))
        """,
    "code object": """
        def f(): pass
        print(f.__code__.co_filename, f.__globals__ is globals(), f.__module__, __builtins__)
        print(eval('__name__'), [x for x in (1, 2) if x > 1])
        """,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("python", EACH)
def test_libraries(both: Pair, tmp_path: Path, library: str, python: str) -> None:
    write(tmp_path / "program.py", LIBRARIES[library])
    for name in ("launcher", "bootseer", "bench", "bootstrap", "in_rank", "ranks"):
        write(tmp_path / f"{name}.py", f"MINE = {name!r}")
    check_same(both("program.py", python=python))


MULTIPROCESSING = """
import multiprocessing, os, sys
def say(*words):
    sys.stdout.write(' '.join(map(str, words)) + '\\n')  # one write: lines of processes do not mix
class C:
    def __init__(self, x): self.x = x
def double(c):
    return C(c.x * 2)
def look(queue):
    queue.put((__name__, sys.argv, sorted(set(globals()) - {'__annotations__'}), '_bootseer_rank' in sys.modules))
if __name__ in ("__main__", "__mp_main__"):
    say('top', __name__)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        say([c.x for c in pool.map(double, [C(1), C(2)])])
        pool.close(); pool.join()
    queue = context.Queue()
    process = context.Process(target=look, args=(queue,))
    process.start()
    name, argv, names, has_ours = queue.get()
    say(name, argv, names, has_ours and sys.argv[1] != 'fork')
    process.join()
    queue.close(); queue.join_thread()
    failing = context.Process(target=os.kill)
    failing.start(); failing.join(); say(failing.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("mode", ["script", "module"])
@pytest.mark.parametrize("python", EACH)
def test_multiprocessing(both: Pair, tmp_path: Path, method: str, mode: str, python: str) -> None:
    write(tmp_path / "program.py", MULTIPROCESSING)
    plain, ours = both("program.py" if mode == "script" else "program", method, mode=mode, python=python)
    assert ours.status == plain.status == 0, ours.stderr
    assert sorted(ours.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert len(ours.stderr.splitlines()) == len(plain.stderr.splitlines())
    assert "bootstrap.py" not in ours.stderr.replace(INSIDE + '", line', "") or method == "fork"


def test_one_frame_of_ours_is_below_the_script(program: Programs, tmp_path: Path) -> None:
    path = write(tmp_path / "program.py", "import traceback; traceback.print_stack()")
    run = program(sys.executable, "-u", INSIDE, "script", "", *IDENTITY, path)
    assert run.stderr.count("File ") == 2
    assert run.stderr.count(INSIDE) == 1


# ---- error file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", EACH)
def test_an_uncaught_exception_leaves_an_error_file(program: Programs, tmp_path: Path, python: str) -> None:
    error = tmp_path / "error.json"
    write(tmp_path / "json.py", "raise SystemExit(99)")
    write(tmp_path / "program.py", "def f():\n    raise ValueError('a \"b\" é')\nf()")
    run = program(
        PYTHONS[python],
        "-u",
        INSIDE,
        "script",
        "",
        *IDENTITY,
        tmp_path / "program.py",
        env={"TORCHELASTIC_ERROR_FILE": str(error)},
    )
    assert run.status == 1
    message = json.loads(error.read_text())["message"]
    assert message["message"] == 'ValueError: a "b" é'
    assert message["extraInfo"]["py_callstack"] == run.stderr
    assert int(message["extraInfo"]["timestamp"]) > 10**9


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(3)",
        "raise KeyboardInterrupt",
        "import os\nif os.fork():\n    os._exit(0 * os.wait()[0])\n1/0",
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('of @record')\n1/0",
        "import os\nos.mkdir(os.environ['TORCHELASTIC_ERROR_FILE'])\n1/0",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    ],
)
def test_other_ends_leave_none(program: Programs, tmp_path: Path, text: str) -> None:
    error = tmp_path / "error.json"
    path = write(tmp_path / "program.py", text)
    env = {"TORCHELASTIC_ERROR_FILE": str(error)}
    program(sys.executable, "-u", INSIDE, "script", "", *IDENTITY, path, env=env)
    assert not error.is_file() or error.read_text() == "of @record"


# ---- run-path ------------------------------------------------------------------------------------------------


def test_run_path(program: Programs, tmp_path: Path) -> None:
    text = "import sys; print(sys.argv, sys.path, __name__, __file__, __package__, __spec__, sys.flags)\n1/0\n"
    path = write(tmp_path / "program.py", text)
    plain = program(sys.executable, "-u", "-c", RUN_PATH, path, "a")
    ours = program(sys.executable, "-u", INSIDE, "run-path", "", *IDENTITY, path, "a")
    assert ours.stdout == plain.stdout
    assert ours.status == plain.status == 1
    of_string = re.compile(r'^  File "<string>".*\n(    .*\n)*', re.MULTILINE)  # from Python 3.13 on with its text
    assert of_string.search(plain.stderr)
    assert ours.stderr == of_string.sub("", plain.stderr)


# ---- first step ----------------------------------------------------------------------------------------------

FAKE_TORCH = {
    "torch/__init__.py": "from torch.optim import optimizer\n",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": """
        import collections
        hooks = collections.OrderedDict()
        class Handle:
            def __init__(self, number): self.number = number
            def remove(self): del hooks[self.number]
        def register_optimizer_step_post_hook(hook):
            hooks[len(hooks)] = hook
            return Handle(len(hooks) - 1)
        class Optimizer:
            def step(self):
                args, kwargs = (), {}
                for hook in hooks.values():
                    hook(self, args, kwargs)
                return len(hooks)
        """,
}


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names_of(events: Sequence[Mapping[str, object]]) -> list[tuple[object, object, object]]:
    return [(event["stage"], event["kind"], event["name"]) for event in events]


SCRIPT = ("spawn", "instant", "script")
IMPORT = [("import", "begin", "torch"), ("import", "end", "torch")]


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    for name, text in FAKE_TORCH.items():
        write(tmp_path / name, text)
    return tmp_path


def run_hooked(
    program: Programs, directory: Path, text: str, python: str = "own"
) -> tuple[Run, list[dict[str, object]]]:
    path = write(directory / "program.py", text)
    events = directory / "events.jsonl"
    run = program(PYTHONS[python], "-u", INSIDE, "script", str(events), *IDENTITY, path)
    return run, read(events)


@pytest.mark.parametrize("python", EACH)
def test_first_step_is_seen_once_and_leaves_nothing(program: Programs, fake_torch: Path, python: str) -> None:
    run, events = run_hooked(
        program,
        fake_torch,
        """
        import importlib.util, sys
        before = list(sys.meta_path)
        assert importlib.util.find_spec("torch").origin == importlib.util.find_spec("torch").loader.path
        assert len(sys.meta_path) == len(before)
        import torch.optim
        from torch.optim import optimizer
        assert type(torch.__spec__.loader).__name__ == type(torch.__loader__).__name__ == "SourceFileLoader"
        assert not any(type(finder).__module__ == "_bootseer_rank" for finder in sys.meta_path)
        one = optimizer.Optimizer()
        assert one.step() == 1
        assert len(optimizer.hooks) == 0
        assert one.step() == 0
        importlib.reload(torch)
        """,
        python,
    )
    assert (run.status, run.stderr) == (0, "")
    assert names_of(events) == [SCRIPT, *IMPORT, ("first_step", "instant", "optimizer_step")]
    assert {(event["run_id"], event["node"], event["rank"], event["attempt"]) for event in events} == {
        ("run", "node-a", 3, 1)
    }
    times = [int(str(event["mono_ns"])) for event in events]
    assert times == sorted(times)


def test_a_failing_import_of_torch_looks_the_same(both: Pair, fake_torch: Path) -> None:
    write(fake_torch / "torch/__init__.py", "from torch.optim import optimizer\nraise OSError('no driver')")
    write(fake_torch / "program.py", "try:\n    import torch\nexcept OSError as e:\n    print(e)\nimport torch")
    check_same(both("program.py", events=str(fake_torch / "events")))
    events = read(fake_torch / "events")
    assert [event.get("error") for event in events] == [None, None, "the import failed", None, "the import failed"]


def test_a_torch_without_hooks_is_reported_as_not_observed(program: Programs, fake_torch: Path) -> None:
    write(fake_torch / "torch/optim/optimizer.py", "class Optimizer: pass")
    run, events = run_hooked(program, fake_torch, "import torch")
    assert (run.status, run.stderr) == (0, "")
    assert [event["name"] for event in events] == ["script", "torch", "not_observed", "torch"] or [
        event["name"] for event in events
    ] == ["script", "torch", "not_observed", "torch"]


def test_without_torch_there_is_only_the_start(program: Programs, tmp_path: Path) -> None:
    run, events = run_hooked(program, tmp_path, "import json")
    assert run.status == 0
    assert names_of(events) == [SCRIPT]


def test_a_forked_child_does_not_speak_for_the_rank(program: Programs, fake_torch: Path) -> None:
    run, events = run_hooked(
        program,
        fake_torch,
        """
        import os, sys
        from torch.optim import optimizer
        if os.fork() == 0:
            optimizer.Optimizer().step()
            sys.modules["_bootseer_rank"].heartbeat(1, {})
            sys.exit()
        os.wait()
        os.closerange(3, 100)
        """,
    )
    assert (run.status, run.stderr) == (0, "")
    assert names_of(events) == [SCRIPT, *IMPORT]


def test_first_heartbeat_is_the_first_step(program: Programs, fake_torch: Path) -> None:
    root = os.path.dirname(os.path.dirname(INSIDE))
    run, events = run_hooked(
        program,
        fake_torch,
        f"""
        import sys
        sys.path.append({root!r})
        import bootseer, time
        for step in range(2000):
            bootseer.heartbeat(step, loss=0.5, note='a "b" é\\n', bad=float("nan"), other=[1])
        began = time.perf_counter()
        for step in range(20000):
            bootseer.heartbeat(step)
        print((time.perf_counter() - began) / 20000)
        from torch.optim import optimizer
        optimizer.Optimizer().step()
        time.sleep(1.1)
        bootseer.heartbeat(7)
        """,
    )
    assert (run.status, run.stderr) == (0, "")
    assert names_of(events) == [
        SCRIPT,
        ("first_step", "instant", "heartbeat"),
        *[(None, "scalar", "heartbeat")] * 16,
        *IMPORT,
        (None, "scalar", "heartbeat"),
    ]
    assert events[2]["attrs"] == {"loss": 0.5, "note": 'a "b" é\n', "bad": "nan", "other": None}
    assert [event["value"] for event in events if event["kind"] == "scalar"] == [*range(16), 7]
    assert float(run.stdout) < 20e-6  # 0.5 us on a quiet machine; this one may be busy


@pytest.mark.parametrize("events", ["/nowhere/events", "/dev/full", "{tmp}", "/proc/self/mem"])
def test_events_that_cannot_be_written_disturb_nothing(program: Programs, fake_torch: Path, events: str) -> None:
    path = write(fake_torch / "program.py", "from torch.optim import optimizer; optimizer.Optimizer().step()")
    run = program(sys.executable, "-u", INSIDE, "script", events.format(tmp=fake_torch), *IDENTITY, path)
    assert (run.status, run.stdout, run.stderr) == (0, "", "")


def test_names_are_quoted(program: Programs, tmp_path: Path) -> None:
    path = write(tmp_path / "program.py", "")
    events = tmp_path / "events"
    odd = 'a"\\\n\t\x7fé\U0001f600'
    run = program(sys.executable, "-u", INSIDE, "script", str(events), odd, odd, "0", "0", "", path)
    assert run.status == 0
    assert read(events)[0]["run_id"] == odd
    assert read(events)[0]["node"] == odd


@pytest.mark.slow
def test_the_first_step_of_real_torch(program: Programs, tmp_path: Path) -> None:
    run, events = run_hooked(
        program,
        tmp_path,
        """
        import sys, torch
        from torch.optim import optimizer
        model = torch.nn.Linear(2, 2)
        one = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            one.step()
            assert not optimizer._global_optimizer_post_hooks
        print(len(sys.meta_path))
        """,
    )
    assert (run.status, run.stderr) == (0, "")
    assert names_of(events) == [SCRIPT, *IMPORT, ("first_step", "instant", "optimizer_step")]


# ---- the page ------------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> Iterator[StatsPageFile]:
    made = StatsPages()
    yield made.renew(1, False)[0]
    made.close()


def run_with_page(program: Programs, page: StatsPageFile, directory: Path, text: str, python: str = "own") -> Run:
    path = write(directory / "program.py", text)
    identity = (*IDENTITY[:-1], page.given)
    return program(PYTHONS[python], "-u", INSIDE, "script", str(directory / "events.jsonl"), *identity, path)


def read_back(page: StatsPageFile) -> tuple[StatsPage, list[Thread]]:
    with open(page.path, "rb") as file:
        data = file.read()
        found = read_page(file.fileno())
    assert found is not None
    return found, parse_stacks(data[PAGE_BYTES:].decode())


@pytest.mark.parametrize("python", EACH)
def test_a_page_has_each_step_and_takes_stacks(
    program: Programs, page: StatsPageFile, fake_torch: Path, python: str
) -> None:
    run = run_with_page(
        program,
        page,
        fake_torch,
        """
        import sys
        assert "faulthandler" not in sys.modules
        import os, signal
        import torch.optim
        from torch.optim import optimizer
        one = optimizer.Optimizer()
        for step in range(3):
            one.step()
        assert len(optimizer.hooks) == 1
        assert not any(type(finder).__module__ == "_bootseer_rank" for finder in sys.meta_path)
        sys.modules["_bootseer_rank"].heartbeat(40, {})
        def inner():
            os.kill(os.getpid(), 59)
        inner()
        import faulthandler
        print(os.getpid(), sys.modules["_thread"].get_ident())
        """,
        python,
    )
    assert (run.status, run.stderr) == (0, "")
    found, threads = read_back(page)
    assert (found.pid, found.main_thread) == tuple(map(int, run.stdout.split()))
    assert (found.steps, found.step, found.stacks_signal) == (4, 40, 59)
    main = find_main(threads, found.main_thread)
    assert [frame.function for frame in main[:3]] == ["inner", "<module>", "<module>"]
    assert [each["name"] for each in read(fake_torch / "events.jsonl")] == [
        "script",
        "torch",
        "torch",
        "optimizer_step",
        "heartbeat",
    ]


@pytest.mark.parametrize("python", EACH)
def test_a_script_that_is_over_says_so_in_its_page(
    program: Programs, page: StatsPageFile, tmp_path: Path, python: str
) -> None:
    ends = """
        import atexit, os, sys
        def at_exit():
            with open(f"/proc/self/fd/{sys.modules['_bootseer_rank'].page.fd}", "rb") as file:
                print(file.read()[29])
        atexit.register(at_exit)
        if os.fork() == 0:
            sys.exit(9)
        os.wait()
        sys.exit(7)
        """
    run = run_with_page(program, page, tmp_path, ends, python)
    assert (run.status, run.stderr) == (7, "")
    assert run.stdout.split() == ["0", "7"], "the child's end is not the rank's; the interpreter was at work still"
    assert read_exit_status(page.path) == 7


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "pass", "1 / 0"])
def test_other_ends_of_a_script_are_none(
    program: Programs, page: StatsPageFile, tmp_path: Path, code: str
) -> None:
    run = run_with_page(program, page, tmp_path, f"import sys\n{code}")
    assert run.status == (code == "1 / 0")
    assert read_exit_status(page.path) == 0


@pytest.mark.parametrize("python", EACH)
def test_heartbeats_after_the_first_are_notes_in_the_page(
    program: Programs, page: StatsPageFile, fake_torch: Path, python: str
) -> None:
    run = run_with_page(
        program,
        page,
        fake_torch,
        """
        import os, sys
        ours = sys.modules["_bootseer_rank"]
        ours.HEARTBEAT_EVERY_NS = 0
        modules = set(sys.modules)
        for step in range(18):
            ours.heartbeat(step, {"loss": step / 2})
        ours.heartbeat(18, {"loss": float("nan"), "note": "a"})
        ours.heartbeat("x", {})
        more = set(each.partition(".")[0] for each in set(sys.modules) - modules)
        assert more <= {"ctypes", "_ctypes", "struct", "_struct", "types", "_types"}, more
        if os.fork() == 0:
            ours.heartbeat(99, {})
            os._exit(0)
        os.wait()
        """,
        python,
    )
    assert (run.status, run.stderr) == (0, "")
    assert [each["value"] for each in read(fake_torch / "events.jsonl") if each["kind"] == "scalar"] == [
        *range(16)
    ]
    with open(page.path, "rb") as file:
        assert [heartbeat_event(note) for note in read_heartbeats(file.fileno(), 0)] == [
            (16, {"loss": 8.0}),
            (17, {"loss": 8.5}),
            (18, {"loss": "nan", "note": "a"}),
            ("x", {}),
        ]
        assert [note.number for note in read_heartbeats(file.fileno(), 2)] == [3, 4]


@pytest.mark.parametrize("python", EACH)
def test_what_a_script_can_see_of_a_page(
    program: Programs, page: StatsPageFile, probes: Path, python: str
) -> None:
    plain = json.loads(program(PYTHONS[python], "-u", "probe.py", cwd=str(probes)).stdout)
    words = ["-u", INSIDE, "script", "", *IDENTITY[:-1], page.given, "probe.py"]
    ours = json.loads(program(PYTHONS[python], *words, cwd=str(probes)).stdout)
    ours["modules"].remove(NAME)
    assert [name for name in ours["finders"] if NAME in name] != []  # until torch is there
    more = set(ours["descriptors"]) - set(plain["descriptors"])
    assert "1000" in more and len(more) <= 2
    changed = {
        key
        for key in plain
        if re.sub("0x[0-9a-f]+", "", str(ours[key])) != re.sub("0x[0-9a-f]+", "", str(plain[key]))
    }
    assert changed <= {"descriptors", "signals", "finders", "importers"}, changed


def test_a_page_that_cannot_be_opened_disturbs_nothing(
    program: Programs, page: StatsPageFile, fake_torch: Path
) -> None:
    for path in ("/nowhere/page", "/dev/full", str(fake_torch), "/proc/self/mem", "/proc/1/fd/0"):
        run = run_with_page(
            program,
            page._replace(given=path),
            fake_torch,
            "from torch.optim import optimizer; optimizer.Optimizer().step(); assert not optimizer.hooks",
        )
        assert (run.status, run.stdout, run.stderr) == (0, "", "")
        assert names_of(read(fake_torch / "events.jsonl"))[-1] == ("first_step", "instant", "optimizer_step")


# ---- output --------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_full_log_disk_does_not_end_training(program: Programs, tmp_path: Path) -> None:
    """stdout on a full file system: everything goes on, and the events say how much was lost."""
    path = write(
        tmp_path / "program.py",
        """
        import os, sys
        for step in range(100):
            print("x" * 9999)
            sys.stderr.write("y" * 1000)
        os.write(9, b"done %d %s" % (step, repr(sys.stdout).encode()))
        sys.stdout.buffer.write(memoryview(b"z" * 5000))
        """,
    )
    events = tmp_path / "events"
    command = (
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path}/small && exec 9>{tmp_path}/told && exec {sys.executable} -u"
    )
    command += f" {INSIDE} script {events} run node 0 0 '' {path} >{tmp_path}/small/out 2>{tmp_path}/small/err"
    (tmp_path / "small").mkdir()
    run = program("unshare", "-m", "sh", "-c", command)
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    assert (
        tmp_path / "told"
    ).read_text() == "done 99 <_io.TextIOWrapper name='<stdout>' mode='w' encoding='utf-8'>"
    lost = [event for event in read(events) if event["name"] == "output_lost"]
    assert len(lost) == 2  # the first time, and at the end
    assert lost[1]["value"] == 100 * 10000 + 100 * 1000 + 5000 - 65536
    assert lost[1]["unit"] == "bytes"


def test_other_errors_of_the_output_are_raised(program: Programs, tmp_path: Path) -> None:
    path = write(
        tmp_path / "program.py",
        """
        import os, signal
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            print("x")
        except OSError as error:
            os._exit(error.errno)
        """,
    )
    run = program(sys.executable, "-u", INSIDE, "script", "", *IDENTITY, path)
    assert run.status == 27


# ---- cost and signals ----------------------------------------------------------------------------------------


def test_a_signal_ends_a_script_that_waits(program: Programs, tmp_path: Path) -> None:
    path = write(tmp_path / "program.py", "import time\nprint('up')\ntime.sleep(60)")
    for signum in (signal.SIGINT, signal.SIGTERM):
        running = program.start(sys.executable, "-u", INSIDE, "script", "", *IDENTITY, path)
        wait_until(lambda running=running: "up" in running.stdout)  # type: ignore[misc]
        running.signal(signum)
        run = running.wait()
        assert run.status == -signum
        assert "bootstrap.py" not in run.stderr
