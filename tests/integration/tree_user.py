"""A user of mounted trees in a process of his own. Usage: tree_user.py mount URL | attack SETTINGS (JSON).

`mount` holds a tree until its stdin ends, and prints where it is. `attack` tries what another user must not be
able to do with somebody's runtime folder, cache and socket; a line for each try: its name, and what it came to.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence

from bootseer.blocks.cache import open_cache
from bootseer.errors import BootseerError
from bootseer.ipc.client import Client
from bootseer.mounts.tree_daemon.mount import TreeOptions, list_trees, mount_tree, unmount_tree


def mount(url: str) -> None:
    tree = mount_tree(url, options=TreeOptions(idle_s=0))
    with tree.hold():
        print(json.dumps([tree.folder, tree.digest, tree.control]), flush=True)
        sys.stdin.read()
    tree.unmount()


def attack(
    root: str, control: str, runtime: str, cache: str, url: str, digest: str, only: Sequence[str] = ()
) -> None:
    theirs = {**os.environ, "BOOTSEER_RUNTIME": runtime}

    def connect() -> object:
        """As a program that was written for it."""
        os.chdir(os.path.dirname(control))  # addresses are short
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.path.basename(control))
            connection.sendall(b'{"do": "stop", "force": true}\n')
            said = connection.recv(1000)
            if not said:
                raise ConnectionResetError(errno.ECONNRESET, "nothing is answered")
            return said

    tries: dict[str, Callable[[], object]] = {
        "list the runtime folder": lambda: os.listdir(runtime),
        "list the tree": lambda: os.listdir(root),
        "read a file": lambda: os.open(os.path.join(root, "0", "file0"), os.O_RDONLY),
        "read the device": lambda: os.open(os.path.join(os.path.dirname(root), "device", "device"), os.O_RDONLY),
        "connect": connect,
        "ask": lambda: _ask(control),
        "list trees": lambda: list_trees(environ=theirs),
        "mount there": lambda: mount_tree(url, environ=theirs, options=TreeOptions(idle_s=1)),
        "unmount": lambda: unmount_tree(digest, force=True, environ=theirs),
        "put a tree there": lambda: os.makedirs(os.path.join(runtime, "trees", "0" * 64)),
        "list the cache": lambda: os.listdir(cache),
        "use the cache": lambda: open_cache({"BOOTSEER_CACHE": cache}),
        "write a block": lambda: os.open(os.path.join(cache, "trees", digest, "data"), os.O_RDWR),
    }
    for name, work in tries.items():
        if only and name not in only:
            continue
        try:
            found = work()
        except BootseerError as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        except OSError as error:
            print(f"{name}: {errno.errorcode[error.errno or 0]}", flush=True)
        else:
            print(f"{name}: DONE {found!r}", flush=True)


def _ask(path: str) -> object:
    control = Client.connect(path)
    assert control is not None
    with control:
        return control.ask("stop", force=True)


if __name__ == "__main__":
    if sys.argv[1] == "mount":
        mount(sys.argv[2])
    else:
        attack(**json.loads(sys.argv[2]))
