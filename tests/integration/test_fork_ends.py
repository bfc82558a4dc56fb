"""The end of a forked rank against that of an exec'd one: what libraries print, free and finalize there.

One job has a rank for each way to end, as their statuses are 0; each rank's stdout and stderr are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests.integration.fork_jobs import Jobs
from tests.support import Programs, needs_program

# As bindings of C++ (nanobind) do: counts its objects, and tells at the very end which have not been freed.
COUNTED = """
#include <Python.h>
#include <stdio.h>
#include <unistd.h>

static int alive;
static void say(const char *what) {
    char line[80];
    if (write(2, line, snprintf(line, sizeof line, "%s %d\\n", what, alive)) < 0) _exit(9);
}
static void at_exit_of_python(void) { if (alive) say("leaked"); }
__attribute__((destructor)) static void unloaded(void) { say("destructor of the library, alive:"); }

typedef struct { PyObject_HEAD PyObject *held; } Counted;
static int visit(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Counted *)self)->held);
    Py_VISIT(Py_TYPE(self));
    return 0;
}
static int clear(PyObject *self) { Py_CLEAR(((Counted *)self)->held); return 0; }
static void dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    alive--;
    type->tp_free(self);
    Py_DECREF(type);
}
static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Counted *self = (Counted *)type->tp_alloc(type, 0);
    if (self) alive++;
    return (PyObject *)self;
}
static PyObject *hold(PyObject *self, PyObject *other) {
    Py_INCREF(other);
    Py_XSETREF(((Counted *)self)->held, other);
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"hold", hold, METH_O, NULL}, {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, dealloc}, {Py_tp_traverse, visit}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {0, NULL}};
#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE)
static PyType_Spec spec = {"counted.Counted", sizeof(Counted), 0, TYPE_FLAGS, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "counted", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_counted(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObject(module, "Counted", type)) return NULL;
    Py_AtExit(at_exit_of_python);
    return module;
}
"""

# What is preloaded: things that are freed, finalized or called at the end.
SANDBOX = """
import atexit, logging.handlers, os, sys, tempfile, threading, weakref
try:
    import counted
except ImportError:
    counted = None

class Finalized:
    def __init__(self, name):
        self.name, self.me = name, self
    def __del__(self, write=os.write):
        write(1, ("del %s\\n" % self.name).encode())

in_a_cycle = Finalized("in a cycle")
def suspended():
    try:
        yield
    finally:
        os.write(1, b"a suspended generator ends\\n")
generator = suspended()
next(generator)
class Plain:
    pass
watched = Plain()
weakref.finalize(watched, os.write, 1, b"weakref.finalize\\n")
atexit.register(os.write, 1, b"atexit of the module\\n")
local = threading.local()
local.value = Finalized("of the main thread")
memory = logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout))
log = logging.getLogger("holder")
log.addHandler(memory)
log.propagate = False
if counted:
    one = counted.Counted()
    one.hold([one, lambda: one])
    class Kept(counted.Counted):
        pass
    Kept.of_the_class = Kept()
"""

ENDINGS = {
    "last statement": "",
    "exit": "sys.exit(0)",
    "cycle of the script": "mine = holder.Finalized('mine')",
    "garbage": "holder.Finalized('garbage'); del holder.in_a_cycle",
    "frozen by the script": "holder.Finalized('mine'); gc.freeze()",
    "thawed by the script": "gc.unfreeze(); print(gc.get_freeze_count())",
    "audit": """
        def hook(name, args):
            if name.startswith("gc."):
                raise PermissionError(name)
        sys.addaudithook(hook)
        """,
    "no collector": "gc.disable(); holder.Finalized('mine')",
    "atexit": "import atexit; atexit.register(lambda: print('atexit', holder.in_a_cycle.name))",
    "thread": """
        def work():
            threading.main_thread().join()
            print('thread', holder.in_a_cycle.name, threading.active_count())
        threading.Thread(target=work).start()
        """,
    "daemon": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "log": "holder.log.error('kept until the end')",
    "child": """
        holder.generator.close()
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        print('child', os.waitpid(pid, 0)[1])
        """,
    "_exit": "print('_exit'); os._exit(0)",
    "warnings": "import warnings; warnings.simplefilter('default'); opened = [open(__file__)]; opened += [opened]",
    "folder": "import tempfile; folder = tempfile.TemporaryDirectory(); folder.me = folder",
    "pool": "from concurrent.futures import thread; pool = thread.ThreadPoolExecutor(1); pool.submit(print, 7)",
    "loop": "import asyncio; loop = asyncio.new_event_loop(); loop.me = loop",
    "faulthandler": "import faulthandler; faulthandler.enable()",
    "last": "class Last:\n    def __del__(self): print('last', sys is None, holder is None)\nlast = Last()",
    "module removed": "del sys.modules['holder'], holder",
}
# From Python 3.13 on, the script's objects may go before or after the preloaded module's values of a thread.
UNORDERED = ("cycle of the script", "last") if sys.version_info >= (3, 13) else ()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("library")
    (directory / "holder.py").write_text(SANDBOX)
    (directory / "counted.c").write_text(COUNTED)
    include = sysconfig.get_path("include")
    words = ["cc", "-shared", "-fPIC", "-O0", f"-I{include}", "-o", "counted.so", "counted.c"]
    subprocess.run(words, cwd=directory, check=True)
    return directory


@needs_program("cc")
def test_a_forked_rank_ends_as_an_execd_one(program: Programs, tmp_path: Path, library: Path) -> None:
    jobs = Jobs(program, tmp_path)
    # Collected once, so that what is freed in one collection at the end is in the same order.
    lines = ["import gc, os, sys, threading, holder", "gc.collect()", "rank = int(os.environ['RANK'])"]
    for number, text in enumerate(ENDINGS.values()):
        lines += [f"if rank == {number}:", textwrap.indent(textwrap.dedent(text).strip() or "pass", "    ")]
    path = jobs.write("program.py", "\n".join(lines) + "\n")
    env = {"PYTHONPATH": os.fspath(library)}
    execd, forked = jobs.both(path, preload="none,holder", nproc=len(ENDINGS), env=env)
    names = list(ENDINGS)
    found = []
    for name, theirs in execd.logs.items():
        case = names[int(name.split("/")[1])]
        in_order = sorted if case in UNORDERED else list
        if in_order(forked.logs[name].splitlines()) != in_order(theirs.splitlines()):
            found.append(f"{case}, {name}: {theirs!r} but {forked.logs[name]!r}")
    assert not found, "\n".join(found)
    assert forked.statuses == execd.statuses == {f"0/{rank}": 0 for rank in range(len(ENDINGS))}
    first = execd.logs["0/0/stdout.log"]
    assert "del in a cycle" in first and "suspended generator" in first, "the cases show something"
    assert "alive: 0" in execd.logs["0/0/stderr.log"]
    # What is frozen at the end stays.
    assert "leaked" in execd.logs[f"0/{names.index('frozen by the script')}/stderr.log"]
