#!/bin/bash
# Python 3.11.7, 3.12.1 and 3.13.0 with lz4 4.4.5: while one thread executes `import lz4.frame`, the same statement in
# another thread can succeed although `lz4` has no attribute `frame` yet. importlib marks the submodule as initialised,
# and only then sets the attribute on the package; a thread that finds the module initialised takes no lock.
# `from lz4 import frame` has no such gap: it falls back to sys.modules.
# Seen: AttributeError: module 'lz4' has no attribute 'frame', once in some hundred starts of a program that
# decompresses in several threads. Here the gap is made wide: setting the attribute waits for the other thread.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q lz4==4.4.5
"$place/venv/bin/python" - <<'PYTHON'
import sys
import threading
import types

import lz4

reached, looked = threading.Event(), threading.Event()


class Slow(types.ModuleType):
    def __setattr__(self, name, value):
        if name == "frame":
            reached.set()
            assert looked.wait(30)
        super().__setattr__(name, value)


lz4.__class__ = Slow
first = threading.Thread(target=lambda: __import__("lz4.frame"))
first.start()
assert reached.wait(30)
seen = []
try:
    import lz4.frame
    lz4.frame
except AttributeError as error:
    seen.append(str(error))
from lz4 import frame
seen.append(frame.__name__)
looked.set()
first.join()
print(sys.version.split()[0], seen)
assert seen == ["module 'lz4' has no attribute 'frame'", "lz4.frame"], seen
PYTHON
