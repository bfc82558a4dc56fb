"""What a rank notes while its start is recorded: files that are opened for reading, folders that are listed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tests import support

CODE = """
import json, os, pathlib, sys, threading
from launcher.in_rank.bootstrap import Opened
opened = Opened()
opened.install()
os.chdir(sys.argv[1])
open("relative").close()
open(sys.argv[1] + "/absolute", "rb").close()
pathlib.Path(sys.argv[1], "by-path").read_text()
os.close(os.open(sys.argv[1] + "/by-os", os.O_RDONLY))
open("written", "w").close()
open("appended", "a").close()
sys.path.append(sys.argv[1])
import module
open(module.__file__).close()
sys.audit("import", "_native", sys.argv[1] + "/_native.so", None, None, None)
sys.audit("ctypes.dlopen", sys.argv[1] + "/library.so")
sys.audit("ctypes.dlopen", "libc.so.6")
os.listdir(sys.argv[1] + "/listed")
list(os.scandir("scanned"))
for args in ((), (1,), ("a", 1), (b"a", "r", 0), ("a", "r", "no flags"), (3, "r", 0), (None, None, None)):
    sys.audit("open", *args)
    sys.audit("os.listdir", *args)
lines = opened.list()
open("too-late").close()
assert opened.list() == []
opened.begin(False)
open("not-asked").close()
assert opened.list() == []
opened.begin(True)
open("asked-again").close()
lines += opened.list()
Opened.MAX_FILES = 2
few = Opened()
few.install()
for name in ("relative", "written", "appended"):
    open(name).close()
print(json.dumps([lines, len(few.list())]))
"""


def test_what_is_read_is_noted(program: support.Programs, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    for name in ("relative", "absolute", "by-path", "by-os", "too-late", "not-asked", "asked-again", "other.py"):
        (directory / name).write_text("x")
    (directory / "module.py").write_text("open(__file__[:-9] + 'other.py').close()")
    for name in ("listed", "scanned"):
        (directory / name).mkdir()
    done = program(*support.python("-c", CODE, str(directory)))
    assert done.status == 0, done.stderr
    lines, most = json.loads(done.stdout)
    own = [line.replace(str(directory), "") for line in lines if f"\t{directory}/" in line]
    cached = importlib.util.cache_from_source("/module.py")
    assert own == [
        *(f"\topen\t/{name}\n" for name in ("relative", "absolute", "by-path", "by-os")),
        f"\topen\t/{cached}\n",  # not its source, until it is asked for as a file
        *(f"\topen\t/{name}\n" for name in ("other.py", "module.py", "_native.so", "library.so")),
        *(f"\tfolder\t/{name}\n" for name in ("listed", "scanned")),
        "\topen\t/asked-again\n",
    ]
    assert most == 2
