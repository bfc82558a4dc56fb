"""What the daemon of a mounted tree imports before the tree can be used: a start may wait for all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.guards.test_imports import belongs, imported

# None of it is needed to mount a tree that lies in a folder. (asyncio and msgspec bring much already.)
HEAVY = {
    *("torch", "numpy", "aiohttp", "fsspec", "pyarrow", "typer", "obstore", "urllib3", "cryptography", "requests"),
    *(
        "argparse",
        "importlib.metadata",
        "http",
        "multiprocessing",
        "hdfs_native",
        "mfusepy",
        "xml",
        "sqlite3",
        "unittest",
    ),
    *("bootseer.env", "bootseer.image", "bootseer.checkpoint", "bootseer.cli", "launcher"),
}
# The minder lives as long as the daemon, and does nothing but wait.
NOT_FOR_THE_REAPER = HEAVY | {"asyncio", "msgspec", "subprocess", "email", "bootseer.aio", "bootseer.blocks"}


def imports_of(code: str) -> set[str]:
    """The modules that code imports, but for those that every interpreter of this environment has."""
    run, base = (
        subprocess.run([sys.executable, "-X", "importtime", "-c", each], capture_output=True, text=True)
        for each in (code, "")
    )
    assert run.returncode == 0, run.stderr
    return imported(run.stderr) - imported(base.stderr)


@pytest.mark.parametrize(
    ("code", "heavy", "known"),
    [
        (
            "from bootseer.mounts.tree_daemon import warm_imports as tree_warm; tree_warm.warm('')",
            HEAVY,
            "bootseer.mounts.tree_daemon.hot",
        ),
        ("import bootseer.mounts.tree_daemon.process", NOT_FOR_THE_REAPER, "bootseer.mounts.tree_daemon.places"),
    ],
    ids=["daemon", "minder"],
)
def test_little_is_imported(code: str, heavy: set[str], known: str) -> None:
    names = imports_of(code)
    assert known in names, "the daemon itself was looked at"
    found = sorted(name for name in names if belongs(name, heavy))
    assert found == [], "these cost time at each start"
