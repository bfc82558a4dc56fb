"""The plan as a whole table, the module lists by properties, the texts of scripts by example."""

from __future__ import annotations

import importlib.util
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks.fork.policy import (
    EXEC,
    FORK,
    FORK_LATER,
    MAX_MODULES,
    UNSAFE_PACKAGES,
    ForkMode,
    ForkPlan,
    choose_modules,
    filter_hot,
    find_environ_conflict,
    find_obstacle,
    find_set_variables,
    is_module_name,
    is_read_at_import,
    mentions_framework,
    plan,
    uses_framework,
)

LIBRARY = "/usr/lib/python3.12/site-packages/"
PARTS = st.sampled_from(["a", "b", "c", "torch", "none", "9", "a-b", "", "ü"])
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(".".join)
NAME_LISTS = st.lists(NAMES, max_size=8).map(tuple)


# ---- the plan ------------------------------------------------------------------------------------------------


def test_plan() -> None:
    records = (None, ("json",), ("json", "torch"))
    flags = (False, True)
    table = itertools.product(ForkMode, ("", "obstacle"), flags, records, ("", "sets X"), ("", "torch reads X"))
    for mode, obstacle, mentions, record, doubt, trouble in table:
        made = plan(mode, obstacle, mentions, record, doubt, trouble)
        assert made == expected_plan(mode, obstacle, mentions, record, doubt, trouble)


def expected_plan(
    mode: ForkMode,
    obstacle: str,
    mentions: bool,
    record: tuple[str, ...] | None,
    doubt: str,
    trouble: str,
) -> ForkPlan:
    """The same said in another way: what the user has decided, then what stands against a fork."""
    is_auto = mode is ForkMode.AUTO
    if mode is ForkMode.OFF or obstacle:
        reason = obstacle if mode in (ForkMode.ON, ForkMode.RESTARTS) else ""
        return ForkPlan(first=False, restarts=False, at_once=False, reason=reason)
    is_worth_it = not is_auto or (mentions if record is None else "torch" in record)
    against = "" if not is_auto else trouble or (doubt if is_worth_it and record is None else "")
    is_first = is_worth_it and mode is not ForkMode.RESTARTS and not against
    return ForkPlan(first=is_first, restarts=True, at_once=is_first, reason=against)


def test_plans_are_consistent() -> None:
    for made in (EXEC, FORK, FORK_LATER):
        assert made.restarts or not made.first
        assert made.at_once == made.first


def test_framework() -> None:
    assert uses_framework(("os", "torch", "torch.nn"))
    assert not uses_framework(("os", "torchlike", "mytorch.torch"))
    assert mentions_framework("from torch import nn")
    assert not mentions_framework("import numpy")


# ---- obstacles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "target", "hooks", "numa", "environ", "named"),
    [
        ("program", "/bin/sh", True, None, {}, "--no-python"),
        ("script", "train.py", False, None, {}, "--rank-hooks off"),
        ("script", "train.py", True, "node", {}, "--numa-binding node"),
        ("script", "train${local_rank}.py", True, None, {}, "train${local_rank}.py"),
        ("script", "-", True, None, {}, "standard input"),
        ("script", "train.py", True, None, {"COVERAGE_PROCESS_START": "rc"}, "COVERAGE_PROCESS_START"),
        ("module", "train", True, None, {"DEBUGPY_RUNNING": "true"}, "DEBUGPY_RUNNING"),
        ("module", "train", True, None, {"NSYS_PROFILING_SESSION_ID": "7"}, "NSYS_PROFILING_SESSION_ID"),
        ("module", "train", True, None, {"PYTHONTRACEMALLOC": "5"}, "PYTHONTRACEMALLOC"),
        ("module", "train", True, None, {"LD_PRELOAD": "/opt/heaptrack/libheaptrack_preload.so"}, "LD_PRELOAD"),
    ],
)
def test_obstacle_names_the_culprit(
    mode: str, target: str, hooks: bool, numa: str | None, environ: dict[str, str], named: str
) -> None:
    said = find_obstacle(mode, target, hooks, numa, environ)
    assert named in said
    assert "\n" not in said
    assert not said.endswith(".")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PYTHONTRACEMALLOC": ""},
        {"PYTHONINSPECT": "0"},
        {"PYTHONPATH": "/src", "LD_PRELOAD": "libjemalloc.so.2"},
        # what an editor sets without a debugger
        {"PYDEVD_DISABLE_FILE_VALIDATION": "1", "DEBUGPY_ADAPTER_ENDPOINTS": "/x", "TERM_PROGRAM": "vscode"},
    ],
)
def test_no_obstacle(environ: dict[str, str]) -> None:
    assert find_obstacle("script", "train.py", True, None, environ) == ""
    assert find_obstacle("module", "-", True, "", environ) == ""


# ---- modules -------------------------------------------------------------------------------------------------


@given(NAME_LISTS, NAME_LISTS, NAME_LISTS, st.sets(NAMES, max_size=4))
def test_chosen_modules(
    given_: tuple[str, ...], default: tuple[str, ...], record: tuple[str, ...], dropped: set[str]
) -> None:
    chosen = choose_modules(given_, default, record, dropped)
    assert len(set(chosen)) == len(chosen)
    for name in chosen:
        assert all(part.isidentifier() for part in name.split("."))
        assert not any(name == other or name.startswith(other + ".") for other in dropped)
    wanted = given_[1:] if given_[:1] == ("none",) else default + given_ + record
    assert list(chosen) == sorted(chosen, key=wanted.index)
    kept = [name for name in wanted if name not in chosen]
    assert all(
        not is_module_name(name) or any(name == other or name.startswith(other + ".") for other in dropped)
        for name in kept
    )


def test_choose_modules_by_example() -> None:
    default, record = ("torch", "torch.distributed"), ("json", "torch.optim")
    assert choose_modules((), default, record, ()) == (*default, *record)
    assert choose_modules(("yaml", "json"), default, record, ()) == (*default, "yaml", "json", "torch.optim")
    assert choose_modules(("none",), default, record, ()) == ()
    assert choose_modules(("none", "json"), default, record, ()) == ("json",)
    assert choose_modules(("yaml",), default, record, {"torch"}) == ("yaml", "json")
    assert choose_modules(("yaml",), default, record, {"torch.optim": "why"}) == (*default, "yaml", "json")
    assert choose_modules((), ("torchvision",), (), {"torch"}) == ("torchvision",)
    many = tuple(f"m{index}" for index in range(MAX_MODULES + 5))
    assert choose_modules((), default, many, ()) == (*default, *many[: MAX_MODULES - 2])


def test_hot_modules_are_those_of_libraries() -> None:
    listing = [
        ("torch", LIBRARY + "torch/__init__.py"),
        ("torch.nn", LIBRARY + "torch/nn/__init__.py"),
        ("json", "/home/me/.pyenv/versions/3.11.7/lib/python3.11/json/__init__.py"),
        ("yaml", "/usr/lib/python3/dist-packages/yaml/__init__.py"),
        ("_bz2", "/usr/lib64/python3.13t/lib-dynload/_bz2.so"),
        ("mine", "/home/me/project/mine.py"),
        ("tools.python3", "/home/me/lib/python/tools.py"),
        ("sys", "built-in"),
        ("zipimport", "frozen"),
        ("no-name", LIBRARY + "x.py"),
        ("a..b", LIBRARY + "x.py"),
        ("x" * 201, LIBRARY + "x.py"),
        ("torch", LIBRARY + "torch/__init__.py"),
    ]
    assert filter_hot(listing) == ("torch", "torch.nn", "json", "yaml", "_bz2")


@pytest.mark.parametrize("name", sorted(UNSAFE_PACKAGES))
def test_unsafe_modules_are_not_hot(name: str) -> None:
    listing = [(name, LIBRARY + "x.py"), (name + ".inner", LIBRARY + "y.py"), (name + "_", LIBRARY + "z.py")]
    assert filter_hot(listing) == (name + "_",)


def test_only_part_of_numba_is_unsafe() -> None:
    assert filter_hot([("numba", LIBRARY), ("numba.core", LIBRARY), ("numba.cuda.args", LIBRARY)]) == (
        "numba",
        "numba.core",
    )


def test_hot_modules_are_bounded() -> None:
    endless = ((f"m{index}", LIBRARY) for index in itertools.count())
    assert len(filter_hot(endless)) == MAX_MODULES


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20))))
def test_any_listing_can_be_filtered(listing: list[tuple[str, str]]) -> None:
    assert set(filter_hot(listing)) <= {name for name, _ in listing}


# ---- what a script says --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('os.environ["A"] = "1"', ("A",)),
        ("environ['A']='1'", ("A",)),
        ('os.environ["A"] = os.environ["B"] = "1"', ("A", "B")),
        ('os.environ["A"] += ":/x"', ("A",)),
        ('os.environb[b"A"] = b"1"', ("A",)),
        ('os.environ.setdefault("A", "1")', ("A",)),
        ('os.environ.setdefault(\n    "A",\n    "1",\n)', ("A",)),
        ('os.environ.update({"A": "1", "B": str(int("2"))})\nx = {"C": 1}', ("A", "B")),
        ('os.environ.update(A="1", B="2")\nC = 3', ("A", "B")),
        ('os.environ.update([("A", "1")])', ("A",)),
        ('os.environ |= {"A": "1",\n "B": "2"}\nC = 3', ("A", "B")),
        ('os.environ |= dict(A="1")', ("A",)),
        ('os.environ |= more\nC = {"D": 1}', ()),
        ('os.putenv("A", "1"); os.unsetenv("B")', ("A", "B")),
        ('os.environ.pop("A", None)\ndel os.environ["B"]', ("A", "B")),
        ('os.environ["B"] = "1"\nos.environ.update(A="1")\nos.environ["B"] = "2"', ("B", "A")),
        ('print(os.environ["A"])', ()),
        ('os.environ["A"] == "1"', ()),
        ('os.environ.get("A")', ()),
        ("os.environ[name] = value", ()),
        ('environment["A"] = "1"', ()),
        ("", ()),
    ],
)
def test_variables_that_a_script_sets(source: str, names: tuple[str, ...]) -> None:
    assert find_set_variables(source) == names


@given(st.text(alphabet="environ.update({[]})|=\"'A:,\n putdel", max_size=200))
def test_any_source_can_be_searched(source: str) -> None:
    for name in find_set_variables("environ " + source):
        assert name in source


def test_search_is_linear() -> None:
    # A quadratic search of these takes minutes.
    for part in ("environ.update({", 'environ["', "environ |= {", "environ "):
        find_set_variables(part * (1 << 16))


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TORCH_LOGS",
        "TMPDIR",
        "TZ",
        "USE_TF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHINDUCTOR_CACHE_DIR",
        "MPLBACKEND",
        "XDG_CACHE_HOME",
        "HF_TOKEN_PATH",
    ],
)
def test_read_at_import(name: str) -> None:
    assert is_read_at_import(name)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "TOKENIZERS_PARALLELISM",
        "WANDB_PROJECT",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONHASHSEED",
        "LD_LIBRARY_PATH",
        "TORCH_NCCL_BLOCKING_WAIT",
        "HF_TOKEN",
        "MY_OMP_NUM_THREADS",
        "CUBLAS_WORKSPACE_CONFIG",
    ],
)
def test_read_later(name: str) -> None:
    assert not is_read_at_import(name)


def test_variables_that_torch_reads_when_imported_are_known() -> None:
    """What one of its config modules reads at its top level."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs torch")
    with open(os.path.join(os.path.dirname(spec.origin), "_dynamo", "config.py"), encoding="utf-8") as file:
        lines = [line for line in file if line[:1].isalpha() and 'os.environ.get("' in line]
    names = [line.partition('os.environ.get("')[2].partition('"')[0] for line in lines]
    assert len(names) > 5
    assert [name for name in names if not is_read_at_import(name)] == []


def test_conflict() -> None:
    assert find_environ_conflict("train.py", "import torch") == ""
    assert find_environ_conflict("train.py", 'os.environ["MASTER_PORT"] = "1"') == ""
    assert (
        find_environ_conflict("train.py", 'os.environ["RANK"] = "1"; os.environ["OMP_NUM_THREADS"] = "1"')
        == "train.py changes OMP_NUM_THREADS itself, which libraries read when they are imported"
    )
    many = "".join(f'os.environ["HF_{index}"] = "1"\n' for index in range(5))
    assert "changes HF_0, HF_1, HF_2 and 2 more itself" in find_environ_conflict("train.py", many)
