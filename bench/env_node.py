"""One node of `bench env` that restores: from an order to an environment that its ranks can use.

    python -m bench.env_node '{"store": URL, "lock": FILE, "target": FOLDER, "way": "unpack" | "mount"}'

Does what the keeper of a job's environment does, in its order: begin what will be needed, import the rest, what a
killed run has left, key, look into the store, restore; then one line of JSON. A mounted environment is there until
a line comes in, then it is taken away. Folders are those of the variables BOOTSEER_CACHE, BOOTSEER_RUNTIME and
BOOTSEER_KEYS.

With "records": true the daemon publishes what was read of the mount, as at a job's first step, before a second
line comes in.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from bootseer.env.service.mount import begin_spares, end_spares, fork_sandbox

if TYPE_CHECKING:
    from bootseer.env.key.keying import Keyed
    from bootseer.env.store.snapshot import Snapshot
    from bootseer.env.store.store import EnvStore
    from bootseer.mounts.sandbox.process import ImageSandbox
    from bootseer.trust import Trust

_KEYED = ("PIP_", "UV_", "CONDA_")


def key_of(lock: str, target: str, environ: Mapping[str, str]) -> Keyed:
    """The key of what a user would order; that the index is a folder of wheels here is the bench's affair."""
    from bootseer.env.key.keying import make_key
    from bootseer.env.spec import SetupSpec

    spec = SetupSpec(
        commands=(f"python3 -m venv {target}", f"{target}/bin/pip install -r {lock}"),
        inputs=(lock,),
        targets=(target,),
        cwd="/",
    )
    return make_key(spec, {name: value for name, value in environ.items() if not name.startswith(_KEYED)})


@contextmanager
def open_env_store(url: str, trust: Trust) -> Iterator[EnvStore]:
    """The environment store, on aio's loop."""
    from bootseer import aio
    from bootseer.env.store.store import EnvStore
    from bootseer.logs import sent_to
    from bootseer.storage import Store, open_store

    async def opened() -> Store:
        return open_store(url)

    store = aio.run_sync(opened())
    try:
        with sent_to(lambda line: print(line, file=sys.stderr)):
            yield EnvStore(store, url, trust)
    finally:
        aio.run_sync(store.aclose())


def find_snapshot(url: str, key: str, trust: Trust) -> tuple[str, Snapshot]:
    """The URL of a tree, and the snapshot that it is of. Raises: NotFound; StorageError."""
    from bootseer import aio
    from bootseer.errors import NotFound
    from bootseer.tree.head import split_pin

    with open_env_store(url, trust) as store:
        found = aio.run_sync(store.find(key, time.time()))
        if found is None:
            raise NotFound(f"{url}: has no environment of the key {key}")
        return split_pin(store.tree_url(found.snapshot))[0], found.snapshot


def main(argv: list[str]) -> int:
    """Restores; see the module's docstring."""
    order = json.loads(argv[0])
    target, way = order["target"], order["way"]
    spec = {"store": order["store"], "targets": [target], "python": ""}
    begin_spares({"ways": ["there", way], "spec": spec})
    sandbox = fork_sandbox() if way == "mount" else None  # before there are threads
    return restore_by(way, order["store"], order["lock"], target, sandbox, records=order.get("records", False))


def restore_by(
    way: str, store: str, lock: str, target: str, sandbox: ImageSandbox | None, *, records: bool = False
) -> int:
    """The exit status."""
    from bootseer import aio
    from bootseer.env.restore.restore import THERE, MountOptions, recover, restore
    from bootseer.env.store.env_tree import StoredTree
    from bootseer.errors import BootseerError
    from bootseer.mounts.tree_daemon.mount import unmount_tree
    from bootseer.trust import Trust

    if sandbox is not None:
        import_module("bootseer.env.restore.mounted")  # before it is needed, as the keeper does
    try:
        recover([target])
        trust = Trust.load()
        key = key_of(lock, target, os.environ).key
        url, snapshot = find_snapshot(store, key, trust)
        mounting = None
        if sandbox is not None:
            from bootseer.env.restore.mounted import OPTIONS

            mounting = MountOptions(sandbox, trust, options=OPTIONS._replace(idle_s=0.0))
        done = restore(snapshot, StoredTree(url, snapshot.tree), ways=(THERE, way), mounting=mounting)
    except BootseerError as error:
        print(f"{way}: {error}", file=sys.stderr)
        if sandbox is not None:
            sandbox.close()
        return 1
    end_spares()
    steps = dict(done.mounted.seconds) if done.mounted is not None else {}
    said = {
        "how": done.how,
        "took_s": done.took_s,
        "prefix": done.prefix,
        "notes": (*done.failures, *done.notes),
        "steps": steps,
    }
    print(json.dumps(said), flush=True)
    if done.mounted is not None:
        sys.stdin.readline()
        if records:
            done.mounted.end_start()  # as at a job's first step
            sys.stdin.readline()
        done.mounted.close()
        unmount_tree(snapshot.tree, force=True)
    aio.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
