"""What bootrun remembers of jobs goes to a folder of the test run, never to the cache of who runs the tests.

Records there would make a later run another one (ranks forked, files read ahead), and push out the user's own. The
guard looks at the real cache before and after: what came there by a test fails the run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

VARIABLE = "BOOTSEER_CACHE_DIR"
KINDS = ("imports", "starts", "loads")
MAX_BYTES = 1 << 20

Stamps = dict[str, tuple[int, int]]


class UserCache:
    """Of the process that starts the tests; workers and programs inherit its folder."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        home = environ.get("HOME") or os.path.expanduser("~")
        given = environ.get("XDG_CACHE_HOME", "")
        above = given if os.path.isabs(given) else os.path.join(home, ".cache")
        self.real = environ.get(VARIABLE) or os.path.join(above, "bootseer")
        self._before = stamps(self.real)
        self.folder = tempfile.mkdtemp(prefix="bt-records-")

    def written(self, ours: Sequence[str], *, is_alone: bool) -> list[str]:
        """Files that tests have put into the real cache.

        Args: ours: parts of paths by which a record shows that it is a test's; is_alone: nobody else runs jobs
            here, so that it is a test's in any case.
        """
        new = [path for path, stamp in stamps(self.real).items() if self._before.get(path) != stamp]
        return [path for path in sorted(new) if is_alone or _mentions(path, ours)]

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def stamps(directory: str) -> Stamps:
    """The time of change and inode of each record."""
    found = {}
    for kind in KINDS:
        try:
            with os.scandir(os.path.join(directory, kind)) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    found[entry.path] = (status.st_mtime_ns, status.st_ino)
        except OSError:
            continue  # there is none, or one has gone meanwhile
    return found


def _mentions(path: str, texts: Sequence[str]) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            content = file.read(MAX_BYTES)
    except OSError:
        return False
    return any(text in content for text in texts)
