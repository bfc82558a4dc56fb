"""A node that wants an environment: it waits for it, or builds and publishes it. Run by path, to be killed.

    env_builder.py FOLDER-OF-STORE FOLDER-OF-FILES BEAT_S BOUND_S

Each stage is written as a line of standard output; the last one says how it ended.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bootseer import aio
from bootseer.env.store.lease import BuilderLease, Lease, WaitResult, renewing
from bootseer.env.store.store import EnvStore, FoundSnapshot
from bootseer.logs import send_to
from bootseer.storage import open_store
from bootseer.trust import Trust
from tests.env_parts import NOW_S, build_into, document, make_snapshot


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    url, files, beat_s, bound_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    key, data = document()
    send_to(say)

    async def begin() -> EnvStore:
        return EnvStore(open_store(url), url, Trust())

    store = aio.run_sync(begin())

    async def find() -> FoundSnapshot | None:
        return await store.find(key, NOW_S)

    async def acquire() -> object:
        leases = BuilderLease(store.store, owner=f"process {os.getpid()}", beat_s=beat_s)
        return await leases.acquire(key, find, bound_s)

    outcome = aio.run_sync(acquire())
    if isinstance(outcome, WaitResult):
        say("waited")
        return
    if not isinstance(outcome, Lease):
        say(f"neither: {outcome}")
        return
    say("building")
    with renewing(outcome):
        from pathlib import Path

        built = build_into(store, key, Path(files))
        say("built")
        snapshot = make_snapshot(key, built.digest, len(built.index_bytes))
        published = aio.run_sync(store.publish(snapshot, data, built.index_bytes, None))
    say(f"published {published.is_ours}")


if __name__ == "__main__":
    main()
