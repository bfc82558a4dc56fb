"""Fixtures that tests of every folder may use; what they give is in support.py and leaks.py."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.logs import sent_to
from launcher.base import children
from tests import support
from tests.leaks import LeakCheck
from tests.user_cache import VARIABLE, UserCache

# In this order: a module that another one has imported would not have its assertions rewritten.
pytest_plugins = [
    *("tests.durations", "tests.campaign", "tests.examples", "tests.schedule"),
    "tests.parity.summing",
]

# Tests below these folders start real processes: each is followed by the leak check.
CHECKED = ("integration", "parity")
HERE = Path(__file__).parent

user_cache = pytest.StashKey[UserCache]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit it
        cache = config.stash[user_cache] = UserCache(os.environ)
        os.environ[VARIABLE] = cache.folder


def pytest_unconfigure(config: pytest.Config) -> None:
    if user_cache in config.stash:
        config.stash[user_cache].close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if user_cache not in session.config.stash:
        return
    cache = session.config.stash[user_cache]
    ours = [os.fspath(HERE), str(session.config.getoption("basetemp") or tempfile.gettempdir())]
    if written := cache.written(ours, is_alone=bool(os.environ.get("CI"))):
        print(f"\ntests have written to the cache in {cache.real}:", *written, sep="\n  ", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Millions of objects that stay: the collector need not look at them after each test."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.path.exists(support.NVIDIA_DRIVER):  # also in CI, which has none
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip("there is no GPU of NVIDIA's here"))


@pytest.fixture(autouse=True)
def leaks(request: pytest.FixtureRequest) -> Iterator[LeakCheck | None]:
    """Fails a test that leaves processes, threads, descriptors or /dev/shm files behind."""
    directory = request.path.relative_to(HERE).parts[0]
    if directory not in CHECKED and "leaks" not in request.node.keywords:
        yield None
        return
    check = LeakCheck()
    yield check
    support.wait_until(children.reap_left)  # killed processes that an overloaded machine ends late
    found = check.leftovers()
    check.close()
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that the library logs in this process, as a program would print them."""
    lines: list[str] = []
    with sent_to(lines.append):
        yield lines


@pytest.fixture
def bootrun(tmp_path: Path) -> Iterator[support.Programs]:
    """`bootrun(*args)` runs the console script to its end; `bootrun.start(*args)` leaves it running."""
    yield from _programs(tmp_path / "bootrun", support.BOOTRUN)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[support.Programs]:
    """The same for torchrun."""
    yield from _programs(tmp_path / "torchrun", support.TORCHRUN)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[support.Programs]:
    """The same for any program: the first argument is its path."""
    yield from _programs(tmp_path / "program")


def _programs(directory: Path, *prefix: str) -> Iterator[support.Programs]:
    directory.mkdir()
    programs = support.Programs(os.fspath(directory), prefix)
    yield programs
    programs.close()


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback that nobody uses at this moment."""
    return support.find_free_port()


@pytest.fixture
def wait_until() -> Callable[..., object]:
    """`wait_until(condition, deadline_s)`: the first true value of the condition."""
    return support.wait_until


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """`script(text, name="script.py")` writes a program for ranks and gives its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return os.fspath(path)

    return write
