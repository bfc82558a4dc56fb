"""Compile caches of real torch: what one node compiled is found on another one, also after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.compile_cache.caches import FirstStepCaches
from bootseer.env.compile_cache.key import make_key
from bootseer.trust import Trust
from tests.campaign import IS_FULL
from tests.support import clean_environ, lacking, wait_until

pytestmark = [
    *(pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(420)),
    pytest.mark.skipif(not IS_FULL, reason="compiles for minutes: BOOTSEER_CAMPAIGN=full"),
]

MODEL = """
import json, sys, time
began = time.monotonic()
import torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
torch.set_num_threads(1)
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 4))
step = time.monotonic()
loss = torch.compile(model)(torch.ones(8, width)).square().mean()
loss.backward()
done = time.monotonic()
found = {name: count for group in ("inductor", "aot_autograd") for name, count in counters[group].items()}
print(json.dumps({
    "step_s": done - step,
    "loss": loss.item(),
    "hits": found.get("autograd_cache_hit", 0),
    "graph_hits": found.get("fxgraph_cache_hit", 0),
    "misses": found.get("autograd_cache_miss", 0) + found.get("fxgraph_cache_miss", 0),
}))
"""

EXTENSION = """
import json, time
from torch.utils import cpp_extension
began = time.monotonic()
made = cpp_extension.load_inline("quick", no_implicit_headers=True, cpp_sources='''
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "quick", "", -1, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_quick() { return PyModule_Create(&module); }
''')
print(json.dumps({"answer": made.answer(), "took_s": time.monotonic() - began, "file": made.__file__}))
"""


class Machine:
    """A node with a user, a disk and a temporary folder of its own."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder = folder
        tmp = folder / "tmp"
        tmp.mkdir(parents=True)
        self.environ = clean_environ() | {
            "BOOTSEER_CACHE": os.fspath(folder / "cache"),
            "TMPDIR": os.fspath(tmp),
            "HOME": os.fspath(folder),
            "LOGNAME": folder.name,
            "USER": folder.name,
            "PYTHONWARNINGS": "ignore",
            "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", ""),
        }
        for name in [name for name in self.environ if name.startswith(("TORCH", "TRITON"))]:
            del self.environ[name]
        key = make_key(sys.executable, self.environ).key
        self.caches = FirstStepCaches(key, self.environ, url=os.fspath(store), trust=Trust([]))

    def start(self, script: str, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *args],
            cwd=self.folder,
            env=self.environ | self.caches.variables,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, script: str, *args: str) -> Any:
        return finish(self.start(script, *args))


def finish(process: subprocess.Popen[bytes]) -> Any:
    try:
        out, _ = process.communicate(timeout=200)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0
    return json.loads(out)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    if shutil.which("c++") is None:
        lacking("there is no C++ compiler")
    made: list[Machine] = []

    def make(name: str) -> Machine:
        made.append(Machine(tmp_path / name, tmp_path / "store"))
        return made[-1]

    yield make
    for each in made:
        each.caches.close()
    aio.close()


def test_what_one_node_compiled_the_others_load(machine: Callable[[str], Machine]) -> None:
    first = machine("ada")
    first.caches.seed()
    ranks = [first.start(MODEL, "16") for _ in range(2)]  # of one node: they share the folder
    cold = [finish(rank) for rank in ranks]
    assert all(each["misses"] for each in cold)
    assert first.caches.capture().generation == 1, first.caches.notes

    second = machine("bob")
    assert second.caches.path != first.caches.path
    assert second.caches.seed().files > 5
    warm = second.run(MODEL, "16")
    assert (warm["misses"], warm["hits"], warm["graph_hits"]) == (0, 1, 2)
    assert warm["loss"] == cold[0]["loss"]
    assert warm["step_s"] < cold[0]["step_s"] / 2, "found, and yet slow"
    assert not list((second.folder / "tmp").rglob("*.gch")), "headers were compiled for nothing"

    other = second.run(MODEL, "24")
    assert other["misses"]
    done = second.caches.capture()
    assert done.generation == 2
    third = machine("eve")
    third.caches.seed()
    for width, loss in (("16", warm["loss"]), ("24", other["loss"])):
        found = third.run(MODEL, width)
        assert (found["misses"], found["loss"]) == (0, loss)
    assert third.caches.capture().files == 0


def test_what_a_killed_rank_had_finished_is_of_use(machine: Callable[[str], Machine]) -> None:
    first = machine("ada")
    first.caches.seed()
    rank = first.start(MODEL, "16")
    inductor = Path(first.caches.variables["TORCHINDUCTOR_CACHE_DIR"])

    def is_compiling() -> bool:
        assert rank.poll() is None, "it ended too early"
        sources = list(inductor.glob("*/*.main.cpp"))
        return any(not path.with_suffix(".so").exists() for path in sources)

    wait_until(is_compiling, 120)
    os.killpg(rank.pid, signal.SIGKILL)
    rank.communicate()
    half = next(inductor.glob("*/*.main.cpp")).with_suffix(".so")
    half.write_bytes((next(inductor.glob("*/*.so"))).read_bytes()[:2000])  # as a linker leaves it that was killed
    done = first.caches.capture()
    assert done.generation == 1, done.line
    assert done.files > 1

    for each in (machine("bob"), first):
        each.caches.seed()
        found = each.run(MODEL, "16")
        assert found["misses"]
    assert first.caches.capture().files > 0
    last = machine("eve")
    last.caches.seed()
    assert last.run(MODEL, "16")["misses"] == 0


def test_an_extension_is_built_once(machine: Callable[[str], Machine], tmp_path: Path) -> None:
    if shutil.which("ninja", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]) is None:
        lacking("there is no ninja")
    first = machine("ada")
    first.caches.seed()
    cold = first.run(EXTENSION)
    assert cold["answer"] == 42
    built = os.stat(cold["file"])
    assert first.caches.capture().generation == 1
    first.caches.close()
    shutil.rmtree(first.folder)

    again = machine("ada")  # another machine, the same paths
    assert again.caches.seed().files > 3
    (Path(cold["file"]).parent / "lock").touch()  # of a rank that was killed meanwhile
    again.caches.seed()
    warm = again.run(EXTENSION)
    assert (warm["answer"], warm["file"]) == (42, cold["file"])
    assert os.stat(warm["file"]).st_mtime_ns == built.st_mtime_ns, "it was built again"
    assert again.caches.capture().files == 0
