"""A forked rank against an exec'd one: the same script, run both ways by bootrun, must not be able to tell.

What does differ is declared in DIFFERENCES, and docs/guide/fork.md has a line for each.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fork_jobs import EXECD, FORKED, Job, Jobs, make_comparable
from tests.integration.test_inside import ENDINGS, LIBRARIES, PYTHONS, SUPPORTED
from tests.support import Programs

HERE = Path(__file__).parent
FINGERPRINT = HERE / "fork_fingerprint.py"
DOCUMENT = HERE.parent.parent / "docs" / "guide" / "fork.md"
TORCH = "torch,torch.distributed"
LIBRARY = "json,logging,multiprocessing.pool,random,secrets,ssl,subprocess,tempfile,threading,uuid"


@pytest.fixture
def jobs(program: Programs, tmp_path: Path) -> Jobs:
    return Jobs(program, tmp_path)


# ---- everything that a script can look at --------------------------------------------------------------------

# Facts of the fingerprint that differ, in a rank before its first import as well as later.
ALWAYS = {"gc.get_freeze_count", "forked without exec", "status FDSize", "sys.path_importer_cache"}
# Facts that may be, at the start, as they are in an exec'd rank once it has imported the same. Tests of their own
# look at sys.modules.
AS_IMPORTED = {"sys.modules", "sys.meta_path", "atexit", "warnings.filters"}


def fingerprints(
    jobs: Jobs, preload: str, imports: str, nproc: int = 2, options: Sequence[str] = (), **more: Any
) -> tuple[Job, Job]:
    """Of both kinds of ranks, from a first attempt and a restart."""
    words = [*options, "--max-restarts", "1", FINGERPRINT, jobs.out, imports, "3"]
    pair = jobs.both(*words, preload=preload, nproc=nproc, **more)
    for job in pair:
        assert job.status == 0, job.stderr
        assert job.logs == dict.fromkeys(job.logs, "")
        assert len(job.out) == 2 * nproc
    return pair


def check_same_facts(execd: Job, forked: Job) -> None:
    found = []
    for name, theirs in execd.out.items():
        ours = forked.out[name]
        for moment in ("start", "after"):
            assert ours[moment].keys() == theirs[moment].keys()
            for fact in theirs[moment].keys() - ALWAYS:
                pair = [normal(theirs[moment][fact]), normal(ours[moment][fact])]
                if moment == "start" and fact in AS_IMPORTED and pair[0] != pair[1]:
                    pair[0] = normal(theirs["after"][fact]) if fact != "sys.modules" else pair[1]
                if pair[0] != pair[1]:
                    found.append(f"{name} {moment} {fact}: {pair[0]!r:.900} but {pair[1]!r:.900}")
    assert not found, "\n".join(found)


def normal(fact: Any) -> Any:
    """Without what differs between any two runs, and without our own finder, which stays longer in some."""
    found = json.loads(make_comparable(json.dumps(fact)))
    if isinstance(found, list):
        return [each for each in found if not str(each).startswith("<_bootseer_rank.FirstStep ")]
    return found


def check_unique(job: Job) -> None:
    """What is random differs between all ranks of all attempts."""
    ranks = [found["unique"] for found in job.out.values()]
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        assert len(set(values)) == len(ranks), f"{name} {values}"


PRELOADS = {"nothing": "none", "json": "none,json", "standard library": f"none,{LIBRARY}"}


@pytest.mark.parametrize("preload", PRELOADS.values(), ids=PRELOADS)
def test_a_script_sees_the_same(jobs: Jobs, preload: str) -> None:
    execd, forked = fingerprints(jobs, preload, LIBRARY)
    check_same_facts(execd, forked)
    check_unique(execd)
    check_unique(forked)
    check_fork_server_modules(execd, forked, preload.split(",")[1:])


def test_a_script_sees_the_same_with_torch(jobs: Jobs) -> None:
    execd, forked = fingerprints(jobs, "", TORCH)
    check_same_facts(execd, forked)
    check_unique(forked)
    check_fork_server_modules(execd, forked, TORCH.split(","))


def check_fork_server_modules(execd: Job, forked: Job, preload: list[str]) -> None:
    """sys.modules at the first statement: that of an exec'd rank, with all that the preloaded modules import."""
    closure = find_closure(preload)
    for name, theirs in execd.out.items():
        plain, ours = set(theirs["start"]["sys.modules"]), set(forked.out[name]["start"]["sys.modules"])
        assert plain - ours == set()
        assert ours - plain == closure - plain


def find_closure(names: list[str]) -> set[str]:
    """What a plain interpreter has more after it has imported these."""
    code = "import sys; before = set(sys.modules)\n"
    code += "".join(f"import {name}\n" for name in names)
    code += "print(' '.join(set(sys.modules) - before))"
    # Not by -c: for that, Python 3.13 imports linecache by itself.
    run = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


ODD_WORDS = ["", "a b", "é", "new\nline", "${local_rank}", "--flag", "\udcff"]
TARGETS = {
    "relative": ["sub/probe.py"],
    "not tidy": ["./sub/../sub/probe.py"],
    "link": ["link.py"],
    "folder": ["folder"],
    "archive": ["archive.zip"],
    "module": ["-m", "package"],
    "module in a package": ["-m", "package.inner"],
    "run-path": ["--run-path", "{folder}/sub/probe.py"],
}


@pytest.mark.parametrize("target", TARGETS)
def test_all_kinds_of_targets(jobs: Jobs, target: str) -> None:
    source = FINGERPRINT.read_text(encoding="utf-8")
    for name in ("sub/probe.py", "folder/__main__.py", "package/__main__.py", "package/inner.py"):
        jobs.write(name, source)
    jobs.write("package/__init__.py", "")
    (jobs.folder / "link.py").symlink_to("sub/probe.py")
    with zipfile.ZipFile(jobs.folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    words = [word.format(folder=jobs.folder) for word in TARGETS[target]]
    pair = jobs.both(*words, jobs.out, "json", "0", *ODD_WORDS, preload="none,json")
    assert pair[1].status == 0, pair[1].stderr
    assert len(pair[1].out) == 1
    check_same_facts(*pair)


# Two sets, so that it takes few jobs.
VARIABLES: dict[str, dict[str, str | None]] = {
    "stricter": {
        "PYTHONOPTIMIZE": "1",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": "/nowhere:somewhere",
        "EMPTY": "",
        "ODD": "a=b\nc \udcff",
        "LONG": "x" * 100_000,
    },
    "looser": {
        "PYTHONDEVMODE": "1",
        "PYTHONIOENCODING": "latin-1:replace",
        "LC_ALL": "C",
        "LANG": None,
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONMALLOC": "malloc",
        "TZ": "Asia/Kathmandu",
        "CUDA_VISIBLE_DEVICES": "3,4",
        "OMP_NUM_THREADS": "2",
    },
}


@pytest.mark.parametrize("which", VARIABLES)
def test_variables_mean_the_same(jobs: Jobs, which: str) -> None:
    pair = fingerprints(jobs, f"none,{LIBRARY}", LIBRARY, nproc=1, env=VARIABLES[which])
    check_same_facts(*pair)


SETTINGS = """
import os, resource, signal, sys
os.umask(0o027)
os.nice(3)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
resource.setrlimit(resource.RLIMIT_STACK, (16 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
for name, value in (("oom_score_adj", "300"), ("coredump_filter", "0x1"), ("timerslack_ns", "70000")):
    with open("/proc/self/" + name, "w") as file:
        file.write(value)
for signum in (signal.SIGHUP, signal.SIGTTOU, signal.SIGUSR2, signal.SIGINT):
    signal.signal(signum, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
import ctypes
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_settings_that_bootrun_was_started_with(jobs: Jobs) -> None:
    """Umask, nice value, limits, affinity, signals and the like."""
    more = {"before": [sys.executable, "-c", SETTINGS]}
    execd, forked = fingerprints(jobs, "none,json", "json", **more)
    check_same_facts(execd, forked)
    facts = forked.out["0-0.json"]["start"]
    seen = [facts["status Umask"], facts["nice"][0], facts["/proc/self/oom_score_adj"], facts["RLIMIT_NOFILE"]]
    assert seen == ["0027", 3, "300\n", [512, 1024]]
    assert facts["PR_GET_NO_NEW_PRIVS"] == 1


def test_local_rank_zero_for_all(jobs: Jobs) -> None:
    pair = fingerprints(jobs, "none,json", "json", options=["--virtual-local-rank"])
    check_same_facts(*pair)
    assert ["LOCAL_RANK", "0"] in pair[1].out["1-0.json"]["start"]["os.environ"]


@pytest.mark.slow
@pytest.mark.parametrize("python", [name for name in SUPPORTED if name != "own"])
def test_a_script_sees_the_same_in_other_pythons(jobs: Jobs, python: str) -> None:
    env = {"PYTHON_EXEC": PYTHONS[python]}
    execd, forked = fingerprints(jobs, f"none,{LIBRARY}", LIBRARY, env=env)
    check_same_facts(execd, forked)
    check_unique(forked)


# ---- what scripts do -----------------------------------------------------------------------------------------


def check_same(execd: Job, forked: Job) -> None:
    """Exit statuses, logs, error files, what went to the console, and what was written below out/."""
    assert forked.statuses == execd.statuses
    assert forked.logs.keys() == execd.logs.keys()
    for name, text in execd.logs.items():
        lines = difflib.unified_diff(text.splitlines(), forked.logs[name].splitlines(), "exec'd", "forked", n=0)
        assert forked.logs[name] == text, "\n".join([name, *lines])
    assert forked.out == execd.out
    assert (forked.status, forked.stdout) == (execd.status, execd.stdout)


# Of the endings and libraries that test_inside.py has, those that depend on the process or on its __main__.
SOME_ENDINGS = (
    *("exit 3", "exit text", "exit large", "exception", "chain", "context", "import fails", "hook", "hook exits"),
    *("interrupt", "SIGINT", "SIGTERM", "abort", "_exit", "thread goes on", "thread fails", "atexit"),
    *("atexit after exception", "del at the end", "del fails", "main removed", "stdout closed", "warning"),
    *("syntax error", "recursion", "faulthandler"),
)
SOME_LIBRARIES = ("pickle", "inspect", "logging", "subprocess", "reload", "runpy", "fork", "exec again")


@pytest.mark.parametrize("ending", SOME_ENDINGS)
def test_endings(jobs: Jobs, ending: str) -> None:
    pair = jobs.both(jobs.write("program.py", ENDINGS[ending]), preload=f"none,{LIBRARY}")
    check_same(*pair)


@pytest.mark.parametrize("library", SOME_LIBRARIES)
def test_libraries_that_look_at_the_script(jobs: Jobs, library: str) -> None:
    path = jobs.write("program.py", textwrap.dedent(LIBRARIES[library]))
    pair = jobs.both(path, preload=f"none,{LIBRARY}")
    assert pair[0].status == 0, pair[0].logs
    check_same(*pair)


def test_crash_with_faulthandler(jobs: Jobs) -> None:
    path = jobs.write("program.py", "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGSEGV)\nf()\n")
    pair = jobs.both(path, preload=f"none,{LIBRARY}", env={"PYTHONFAULTHANDLER": "1"})
    assert pair[1].statuses == {"0/0": -11}
    assert 'program.py", line 3 in f' in pair[1].logs["0/0/stderr.log"]
    check_same(*pair)


BEHAVIOURS = {
    "pools": """
        import multiprocessing, sys
        class Answer:
            def __init__(self, number):
                self.number = number
        def work(number):
            return __name__, sys.argv, sys.path[0], Answer(number * number)
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    for name, argv, path0, answer in pool.map(work, range(3)):
                        print(method, name, argv, path0, answer.number, type(answer).__name__)
        else:
            assert __name__ == "__mp_main__", __name__
        """,
    "default start method": """
        import multiprocessing, os
        def work(queue):
            queue.put([multiprocessing.current_process().name, multiprocessing.parent_process().name])
        if __name__ == "__main__":
            queue = multiprocessing.Queue()
            process = multiprocessing.Process(target=work, args=(queue,))
            process.start()
            print(queue.get(), process.name, multiprocessing.get_start_method())
            process.join()
            print(process.exitcode)
        """,
    "executors": """
        import asyncio, concurrent.futures, sys, threading
        def work(number):
            return number * number
        async def run_child():
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(5)", stdout=-1)
            return await child.communicate()
        if __name__ == "__main__":
            for kind in (concurrent.futures.ThreadPoolExecutor, concurrent.futures.ProcessPoolExecutor):
                with kind(2) as executor:
                    print(list(executor.map(work, range(4))))
            print(asyncio.run(run_child()))
            print(threading.current_thread() is threading.main_thread())
        """,
    "fork again": """
        import atexit, os, sys, threading
        atexit.register(lambda: print("atexit", os.environ["RANK"], flush=True))
        calls = []
        os.register_at_fork(before=lambda: calls.append("before"), after_in_child=lambda: calls.append("child"),
                            after_in_parent=lambda: calls.append("parent"))
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            print(calls, os.getppid() == parent, os.getsid(0) == parent, threading.current_thread().name)
            sys.exit(5)
        print(os.waitpid(pid, 0)[1], calls)
        pid = os.fork()
        if pid == 0:
            raise KeyError("in the child")
        print(os.waitpid(pid, 0)[1])
        try:
            os.waitpid(-1, 0)
        except ChildProcessError as error:
            print(error)
        """,
    "children": """
        import os, subprocess, sys
        code = "import os; print([*os.environ.items()], os.listdir('/proc/self/fd'), os.getcwd())"
        code += "; print(open('/proc/self/status').read().split('SigBlk')[1].split('SigCgt')[0])"
        os.environ["ADDED"] = "1"
        del os.environ["RANK"]
        subprocess.run([sys.executable, "-c", code])
        os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ), 0)
        os.system("echo $ADDED $RANK $LOCAL_RANK $0")
        print(subprocess.run("cat", input=b"text", capture_output=True))
        """,
    "working folder": """
        import multiprocessing, os
        def work():
            print(os.getcwd(), __name__, __file__, flush=True)
        if __name__ == "__main__":
            os.makedirs("elsewhere")
            os.chdir("elsewhere")
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
            work()
            os.rmdir(os.getcwd())
        """,
    "signals and timers": """
        import signal, threading, time
        def handler(number, frame):
            print(number, frame.f_code.co_name, threading.current_thread().name)
        signal.signal(signal.SIGALRM, handler)
        signal.signal(signal.SIGUSR1, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        signal.pause()
        signal.raise_signal(signal.SIGUSR1)
        timer = threading.Timer(0.01, print, ["timer"])
        timer.start()
        timer.join()
        """,
    "streams": """
        import io, os, sys
        print(sys.stdout, sys.stderr.buffer)
        sys.stdout.write("no newline")
        os.write(1, b" in order ")
        sys.__stdout__.write("again\\n")
        sys.stdout.reconfigure(errors="replace", encoding="ascii")
        print("\\xe9")
        sys.stdout.flush()
        os.dup2(2, 1)
        print("to stderr")
        sys.stdout = open(1, "w", closefd=False)
        print("other object")
        """,
    "depth": """
        import sys
        def depth(number):
            try:
                return depth(number + 1)
            except RecursionError:
                return number
        print(depth(0), sys.getrecursionlimit())
        """,
    "seeds": """
        import random, uuid
        random.seed(5)
        print(random.random(), random.getrandbits(64), random.Random(3).random())
        print(uuid.uuid5(uuid.NAMESPACE_DNS, "name"))
        """,
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_behaviours(jobs: Jobs, behaviour: str) -> None:
    path = jobs.write("program.py", textwrap.dedent(BEHAVIOURS[behaviour]))
    pair = jobs.both(path, "a word", preload=f"none,{LIBRARY},asyncio,concurrent.futures.process", deadline_s=20.0)
    assert pair[0].status == 0, pair[0].logs
    assert any(pair[0].logs.values())
    check_same(*pair)


def test_classes_of_main_travel_between_ranks(jobs: Jobs) -> None:
    text = """
        import os, pickle, time
        class Message:
            text = "from rank 0"
        path = os.environ["OUT"] + "/message"
        if os.environ["RANK"] == "0":
            with open(path + ".part", "wb") as file:
                pickle.dump([Message(), Message], file)
            os.rename(path + ".part", path)
        else:
            while not os.path.exists(path):
                time.sleep(0.002)
            with open(path, "rb") as file:
                message, kind = pickle.load(file)
            print(message.text, kind is Message)
        """
    path = jobs.write("program.py", textwrap.dedent(text))
    pair = jobs.both(path, nproc=2, preload=f"none,{LIBRARY},pickle", env={"OUT": os.fspath(jobs.out)})
    assert pair[0].logs["0/1/stdout.log"] == "from rank 0 True\n"
    check_same(*pair)


@pytest.mark.parametrize("redirects", ["0", "1", "3"])
def test_console(jobs: Jobs, redirects: str) -> None:
    """Output that is not redirected, or copied, and bootrun's own standard input."""
    text = "import os, sys\nprint('out', sys.stdin.read())\nsys.stderr.write('err\\n')\nos.write(1, b'low\\n')\n"
    path = jobs.write("program.py", text)
    with open(jobs.write("input", "some input"), "rb") as file:
        found = []
        for mode in (EXECD, FORKED):
            file.seek(0)
            words = ["--tee", "2" if redirects == "1" else "0", path]
            found.append(jobs.run(mode, *words, preload="none,json", redirects=redirects, stdin=file.fileno()))
    assert "some input" in found[0].stdout + found[0].logs.get("0/0/stdout.log", "")
    check_same(*found)


def test_hashes_with_a_seed(jobs: Jobs) -> None:
    path = jobs.write("program.py", "print(hash('text'), {'a', 'b', 'c', 'd'})")
    check_same(*jobs.both(path, nproc=2, preload="none,json", env={"PYTHONHASHSEED": "0"}))


def test_what_an_import_leaves_to_be_collected(jobs: Jobs) -> None:
    """Imports are collected after more rarely than the interpreter does; what is garbage keeps no file open."""
    jobs.write(
        "culprit.py",
        "import gc\ngc.disable()\n\nclass Open:\n    def __init__(self):\n"
        "        self.file, self.me = open(__file__), self\nOpen()\ngc.enable()\n",
    )
    path = jobs.write("program.py", "import culprit, gc\nprint(gc.get_threshold(), gc.isenabled())")
    check_same(*jobs.both(path, nproc=2, preload="none,culprit"))


def test_an_import_that_sets_how_often_is_collected(jobs: Jobs) -> None:
    jobs.write("culprit.py", "import gc\ngc.set_threshold(12345, 6, 7)")
    path = jobs.write("program.py", "import culprit, gc\nprint(gc.get_threshold())")
    check_same(*jobs.both(path, nproc=2, preload="none,culprit"))


def test_a_script_that_changes_between_attempts(jobs: Jobs) -> None:
    text = (
        "import sys\nprint('first')\nwith open(__file__, 'w') as file:\n    file.write('print(2)')\nsys.exit(3)\n"
    )
    found = []
    for mode in (EXECD, FORKED):
        path = jobs.write("program.py", text)
        found.append(jobs.run(mode, "--max-restarts", "1", path, preload="none,json"))
    assert found[1].logs["1/0/stdout.log"] == "2\n"
    check_same(*found)


# ---- modules of the user's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["script", "module"])
def test_files_beside_the_script_win(jobs: Jobs, target: str) -> None:
    """Over modules of the same name that are preloaded, as they do without."""
    jobs.write("sub/uuid.py", "import random\nWHO = 'mine'\n")
    jobs.write("sub/package/__init__.py", "from . import inner\n")
    jobs.write("sub/package/inner.py", "VALUE = 7\n")
    jobs.write("sub/program.py", "import uuid, package\nprint(uuid.WHO, uuid.__file__, package.inner.VALUE)\n")
    words, cwd = (
        (["sub/program.py"], jobs.folder) if target == "script" else (["-m", "program"], jobs.folder / "sub")
    )
    pair = jobs.both(*words, preload="none,uuid,package,json", cwd=cwd)
    assert pair[0].logs["0/0/stdout.log"].startswith("mine "), pair[0].logs
    check_same(*pair)


def test_a_file_that_breaks_a_fork_server_module(jobs: Jobs) -> None:
    """An unlucky name: what fails in the script fails while preloading, so the ranks are exec'd."""
    jobs.write("bisect.py", "")
    path = jobs.write(
        "program.py", "try:\n    import random\nexcept ImportError as error:\n    print(error.name)\n"
    )
    execd = jobs.run(EXECD, path, preload="none,random")
    instead = jobs.run(FORKED, path, preload="none,random", how="exec")
    assert instead.stderr.count("ranks are exec'd, not forked: random cannot be imported") == 1
    check_same(execd, instead)


WATCHER = """
import atexit, logging, os, random, sys, tempfile, time
log = logging.getLogger("watcher")
log.addHandler(logging.StreamHandler())
stdout_log = logging.getLogger("watcher.stdout")
stdout_log.addHandler(logging.StreamHandler(sys.stdout))
calls = []
os.register_at_fork(before=lambda: calls.append("before"), after_in_parent=lambda: calls.append("parent"),
                    after_in_child=lambda: calls.append("child"))
atexit.register(lambda: print("the watcher's atexit", os.environ["RANK"]))
generator = random.Random()
pid = os.getpid()
time_s = time.time()
is_terminal = sys.stdin.isatty()
environ = dict(os.environ)
argv = list(sys.argv)
folder = tempfile.mkdtemp()
ballast = bytearray(64 << 20)
"""


def test_hooks_and_handlers_of_fork_server_modules(jobs: Jobs) -> None:
    """Logging handlers write into the rank's own log; hooks of a fork and of the end run in each rank."""
    text = """
        import os, sys, watcher
        watcher.log.warning("rank %s", os.environ["RANK"])
        watcher.stdout_log.warning("rank %s", os.environ["RANK"])
        watcher.calls.clear()
        if os.fork() == 0:
            print("child", watcher.calls)
            os._exit(0)
        os.wait()
        print("rank", watcher.calls)
        """
    path = jobs.write("program.py", textwrap.dedent(text))
    jobs.write("library/watcher.py", WATCHER)
    env = {"PYTHONPATH": os.fspath(jobs.folder / "library")}
    pair = jobs.both(path, preload="none,watcher", nproc=2, env=env)
    assert pair[0].logs["0/1/stderr.log"] == "rank 1\nrank 1\n"
    check_same(*pair)


CHANGER = """
import __main__ as script
import locale, logging, os, signal, sys, warnings
os.environ["ADDED"] = "1"
os.environ["PATH"] += ":/added"
os.environ.pop("LANG", None)
sys.path.insert(0, "/first")
sys.path.append("/last")
sys.argv.append("added")
locale.setlocale(locale.LC_ALL, "C")
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
os.umask(0o77)
sys.setrecursionlimit(1234)
warnings.simplefilter("ignore")
logging.basicConfig(format="%(levelname)s %(message)s")
seen = [sys.argv[0], sorted(vars(script)), script.__file__, type(script.__loader__).__name__, script.__spec__]
class Wrapper:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text.replace("argument", "ARGUMENT"))
    def flush(self):
        self.stream.flush()
sys.stdout = Wrapper(sys.stdout)
"""


def test_what_imports_change_is_changed_in_ranks(jobs: Jobs) -> None:
    """And modules that have kept the script's module, as dill has, have the right one."""
    text = """
        import changer, locale, logging, os, signal, subprocess, sys
        logging.warning("to the log")
        print(*os.environ.items(), sep="\\n")
        print(*sys.path, *sys.argv, sep="\\n")
        print(locale.setlocale(locale.LC_ALL), signal.getsignal(signal.SIGUSR2), os.umask(0))
        print(sys.getrecursionlimit())
        print(changer.seen, changer.script is sys.modules["__main__"], changer.script.__dict__ is globals())
        subprocess.run(["env"])
        """
    path = jobs.write("program.py", textwrap.dedent(text))
    jobs.write("library/changer.py", CHANGER)
    env = {"PYTHONPATH": os.fspath(jobs.folder / "library"), "LANG": "C.UTF-8"}
    pair = jobs.both(path, "argument", preload="none,changer", env=env)
    assert pair[0].logs["0/0/stderr.log"] == "WARNING to the log\n"
    assert "ARGUMENT" in pair[0].logs["0/0/stdout.log"]
    check_same(*pair)


@pytest.mark.parametrize("environ", [{"PYTHONWARNINGS": "error"}, {"PYTHONSAFEPATH": "1"}], ids=str)
def test_shadowing(jobs: Jobs, environ: dict[str, str]) -> None:
    jobs.write("uuid.py", "WHO = 'mine'")
    path = jobs.write("program.py", "import uuid\nprint(getattr(uuid, 'WHO', 'theirs'))")
    pair = jobs.both(path, preload="none,uuid", env=environ)
    check_same(*pair)


# ---- what differs --------------------------------------------------------------------------------------------

LOOK = """
import gc, os, sys
out = {"modules": "watcher" in sys.modules}
def resident_kib():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
out["memory"] = resident_kib()
import watcher
out["at-fork hooks"] = list(watcher.calls)
out["per-rank values"] = [watcher.environ.get("RANK"), watcher.argv[-1], watcher.pid == os.getpid()]
out["time of import"] = watcher.time_s
out["random generators"] = watcher.generator.random()
out["temporary files"] = watcher.folder
out["terminal"] = watcher.is_terminal
out["sitecustomize"] = sys.modules["sitecustomize"].rank
out["hash()"] = hash("some text")
stack = [line for line in open("/proc/self/maps") if line.endswith("[stack]\\n")]
out["addresses"] = stack[0].split("-")[0]
out["garbage collector"] = any(each is watcher.__dict__ for each in gc.get_objects())
import json
with open(os.environ["OUT"] + "/" + os.environ["RANK"] + ".json", "w") as file:
    json.dump(out, file)
del watcher.cycle
"""

CYCLE = """
class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("collected at the end")
cycle = Cycle()
"""

Values = list[Any]  # of the two ranks
# What differs, by the name that it has in docs/guide/fork.md: how, as a check of what exec'd and forked ranks see.
DIFFERENCES: dict[str, Callable[[Values, Values], bool]] = {
    "modules": lambda execd, forked: execd == [False, False] and forked == [True, True],
    "memory": lambda execd, forked: max(execd) < 64 << 10 <= min(forked),
    "at-fork hooks": lambda execd, forked: execd == [[], []] and "child" in forked[0],
    "per-rank values": lambda execd, forked: (
        execd == [["0", "0", True], ["1", "1", True]] and forked == [[None, "${local_rank}", False]] * 2
    ),
    "time of import": lambda execd, forked: forked[0] == forked[1] and max(execd) != forked[0],
    "random generators": lambda execd, forked: execd[0] != execd[1] and forked[0] == forked[1],
    "temporary files": lambda execd, forked: execd[0] != execd[1] and forked[0] == forked[1],
    "terminal": lambda execd, forked: execd == [True, True] and forked == [False, False],
    "sitecustomize": lambda execd, forked: execd == ["0", "1"] and forked == [None, None],
    "hash()": lambda execd, forked: execd[0] != execd[1] and forked[0] == forked[1],
    "addresses": lambda execd, forked: execd[0] != execd[1] and forked[0] == forked[1],
    "garbage collector": lambda execd, forked: execd == [True, True] and forked == [False, False],
}
# Those that other tests show (ALWAYS above; test_fork_libraries.py), and those that need what the tests have not.
SHOWN_ELSEWHERE = {"sys.path_importer_cache", "kernel's notes", "threads of libraries", "crash reports"}
NOT_TESTED = {"setproctitle", "start time", "import in the events"}


def test_what_differs(jobs: Jobs) -> None:
    path = jobs.write("program.py", LOOK)
    jobs.write("library/watcher.py", WATCHER + CYCLE)
    jobs.write("library/sitecustomize.py", "import os\nrank = os.environ.get('RANK')\n")
    env = {"PYTHONPATH": os.fspath(jobs.folder / "library"), "OUT": os.fspath(jobs.out)}
    primary, secondary = os.openpty()
    try:
        words = [path, "${local_rank}"]
        execd, forked = jobs.both(*words, preload="none,watcher", nproc=2, env=env, stdin=secondary)
    finally:
        os.close(primary)
        os.close(secondary)
    seen = [[job.out[f"{rank}.json"] for rank in (0, 1)] for job in (execd, forked)]
    assert seen[0][0].keys() == DIFFERENCES.keys()
    for name, holds in DIFFERENCES.items():
        values = [[rank[name] for rank in ranks] for ranks in seen]
        assert holds(*values), f"{name}: {values}"
    assert [job.logs["0/1/stdout.log"].count("collected") for job in (execd, forked)] == [1, 1]


def test_every_difference_is_in_the_document() -> None:
    section = (
        DOCUMENT.read_text(encoding="utf-8").partition("## How a forked rank differs")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    assert set(rows[1:]) == {*DIFFERENCES, *SHOWN_ELSEWHERE, *NOT_TESTED}
