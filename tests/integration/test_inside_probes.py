"""What of inductor is spared in ranks whose compile caches are kept: probes, and headers of kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.in_rank.bootstrap import KEEP_CACHES
from tests.support import Programs, Run

INSIDE = os.path.abspath("launcher/in_rank/bootstrap.py")
IDENTITY = ("run", "node-a", "0", "0", "")
MODULE = """
class VecISA:
    def _probe_load(self, output_path):
        print("process for", output_path.rpartition("/")[2])
        return output_path.endswith("good.so")
"""
SCRIPT = """
import sys
from torch._inductor import cpu_vec_isa
for name in ("good.so", "bad.so"):
    print(name, cpu_vec_isa.VecISA()._probe_load(sys.argv[1] + "/" + name))
print([finder._module for finder in sys.meta_path if getattr(finder, "_module", "") in sys.modules])
"""
PLAIN = ["process for good.so", "good.so True", "process for bad.so", "bad.so False"]
MARKED = ["good.so True", "process for bad.so", "bad.so False"]

Start = Callable[..., Run]


@pytest.fixture
def start(program: Programs, tmp_path: Path) -> Start:
    """Runs SCRIPT, or another one, as a rank with a torch that has no more than the module."""
    (tmp_path / "torch" / "_inductor").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    for name in ("torch", "torch/_inductor"):
        (tmp_path / name / "__init__.py").touch()

    def run(
        script: str = SCRIPT,
        module: str = MODULE,
        *,
        name: str = "cpu_vec_isa",
        variables: dict[str, str] | None = None,
    ) -> Run:
        (tmp_path / "torch" / "_inductor" / f"{name}.py").write_text(module)
        (tmp_path / "rank.py").write_text(script)
        env = {KEEP_CACHES: "1"} if variables is None else variables
        words = [sys.executable, "-B", "-u", INSIDE, "script", "", *IDENTITY]
        return program(*words, os.fspath(tmp_path / "rank.py"), os.fspath(tmp_path / "cache"), env=env)

    return run


def said(run: Run) -> list[str]:
    assert (run.status, run.stderr) == (0, "")
    return run.stdout.splitlines()


def test_what_loaded_once_is_not_tried_again(start: Start, tmp_path: Path) -> None:
    assert said(start()) == [*PLAIN, "[]"]
    assert os.listdir(tmp_path / "cache") == ["good.so.loads"]
    assert said(start()) == [*MARKED, "[]"]


def test_without_kept_caches_torch_does_it_alone(start: Start, tmp_path: Path) -> None:
    assert said(start()) == [*PLAIN, "[]"]  # leaves a mark
    assert said(start(variables={})) == [*PLAIN, "[]"]
    assert said(start(variables={KEEP_CACHES: "0"})) == [*PLAIN, "[]"]


def test_a_directory_that_takes_no_mark_changes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache").rmdir()
    assert said(start()) == [*PLAIN, "[]"]


@pytest.mark.parametrize(
    "module",
    [
        MODULE.replace("_probe_load", "_load_probe") + "    _probe_load = len\n",
        MODULE.replace("output_path", "other_path"),
        MODULE.replace("(self, output_path)", "(self, output_path, timeout=3)"),
    ],
    ids=["not a function", "another argument", "one more argument"],
)
def test_a_torch_that_does_it_otherwise_is_left_alone(start: Start, tmp_path: Path, module: str) -> None:
    script = "import torch._inductor.cpu_vec_isa as c; print(c.VecISA._probe_load.__module__)"
    plain = said(start(script, module, variables={}))
    assert said(start(script, module)) == plain != ["_bootseer_rank"]
    assert os.listdir(tmp_path / "cache") == []


def test_a_torch_without_the_class(start: Start) -> None:
    assert said(start("import torch._inductor.cpu_vec_isa; print('imported')", "")) == ["imported"]


def test_an_import_that_failed_is_waited_for_again(start: Start) -> None:
    module = "import sys\nif not hasattr(sys, 'second'):\n    raise ImportError('not yet')\n" + MODULE
    first = "import importlib.util, sys\nimportlib.util.find_spec('torch._inductor.cpu_vec_isa')\n"
    first += "try:\n    import torch._inductor.cpu_vec_isa\nexcept ImportError as error:\n    print(error)\n"
    assert said(start(first + "sys.second = 1\n" + SCRIPT, module)) == ["not yet", *PLAIN, "[]"]
    assert said(start(first + "sys.second = 1\n" + SCRIPT, module)) == ["not yet", *MARKED, "[]"]


# ---- headers ---------------------------------------------------------------------------------------------------

# As torch has it: before a kernel is looked for, the headers that it would be compiled with are.
CODECACHE = """
import functools, os
@functools.cache
def _precompile_header(header, hashable_cmd_line, **compile_command):
    print("header", header, hashable_cmd_line, compile_command)
    return "/tmp/made.h"
class CppCodeCache:
    @classmethod
    def load_async(cls, main_path):
        flags = []
        for each in ("torch/a.h", "torch/b.h"):
            flags.append(_precompile_header(each, "g++", device_type="cpu"))
        if not os.path.exists(main_path[:-4] + ".so"):
            print("kernel", flags)
        return flags
def package(main_path):
    return _precompile_header("torch/aoti.h", "g++")
"""
KERNELS = """
import sys
from torch._inductor import codecache
for name in ("there", "new", "there"):
    print(name, codecache.CppCodeCache.load_async(f"{sys.argv[1]}/{name}.main.cpp"))
print(codecache.package(f"{sys.argv[1]}/there.main.cpp"))
"""
COMPILES = [
    "header torch/a.h g++ {'device_type': 'cpu'}",
    "header torch/b.h g++ {'device_type': 'cpu'}",
]
NEW = ["kernel ['/tmp/made.h', '/tmp/made.h']", "new ['/tmp/made.h', '/tmp/made.h']"]
PACKAGE = ["header torch/aoti.h g++ {}", "/tmp/made.h"]


def test_no_header_is_compiled_for_a_kernel_that_is_there(start: Start, tmp_path: Path) -> None:
    """Its name stands for it: a compiler that was called all the same would find it where torch's headers are."""
    (tmp_path / "cache/there.main.so").touch()
    there = "there ['torch/a.h', 'torch/b.h']"
    run = start(KERNELS, CODECACHE, name="codecache")
    assert said(run) == [there, *COMPILES, *NEW, there, *PACKAGE]


def test_without_kept_caches_torch_compiles_its_headers(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache/there.main.so").touch()
    there = "there ['/tmp/made.h', '/tmp/made.h']"
    run = start(KERNELS, CODECACHE, name="codecache", variables={})
    assert said(run) == [*COMPILES, there, *NEW, there, *PACKAGE]


@pytest.mark.parametrize(
    "module",
    [
        CODECACHE.replace("_precompile_header", "_precompiled"),
        CODECACHE.replace("(header, hashable_cmd_line,", "(kind, header, hashable_cmd_line='',"),
        CODECACHE.replace("main_path", "path"),
    ],
    ids=["another function", "other arguments", "another caller"],
)
def test_a_torch_that_has_other_headers_is_left_alone(start: Start, tmp_path: Path, module: str) -> None:
    (tmp_path / "cache/there.main.so").touch()
    plain = said(start(KERNELS, module, name="codecache", variables={}))
    assert said(start(KERNELS, module, name="codecache")) == plain
