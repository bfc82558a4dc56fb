"""Environments: the changes that set-up commands make to directories, captured once and restored on every node.

Names are loaded on first use. Import a function that has the name of its module from that module:
`bootseer.env.key.explain`, `restore`, `snapshot`, `document`, `markers`.
docs/reference/formats.md describes the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.env.capture.capture import Built as Built
    from bootseer.env.capture.capture import Capture as Capture
    from bootseer.env.capture.capture import Changes as Changes
    from bootseer.env.capture.capture import Facts as Facts
    from bootseer.env.compile_cache.caches import Captured as Captured
    from bootseer.env.compile_cache.caches import FirstStepCaches as FirstStepCaches
    from bootseer.env.compile_cache.caches import Seeded as Seeded
    from bootseer.env.key.document import Change as Change
    from bootseer.env.key.document import KeyDocument as KeyDocument
    from bootseer.env.key.explain import Explanation as Explanation
    from bootseer.env.key.keying import Keyed as Keyed
    from bootseer.env.key.keying import make_key as make_key
    from bootseer.env.restore.mounted import MountedEnv as MountedEnv
    from bootseer.env.restore.mounted import mount_env as mount_env
    from bootseer.env.restore.restore import MountOptions as MountOptions
    from bootseer.env.restore.restore import Restored as Restored
    from bootseer.env.service.commands import SetupResult as SetupResult
    from bootseer.env.service.commands import run_setup as run_setup
    from bootseer.env.spec import SetupSpec as SetupSpec
    from bootseer.env.store.lease import BuilderLease as BuilderLease
    from bootseer.env.store.lease import Lease as Lease
    from bootseer.env.store.lease import LeaseHolder as LeaseHolder
    from bootseer.env.store.snapshot import Snapshot as Snapshot
    from bootseer.env.store.store import EnvStore as EnvStore
    from bootseer.env.store.store import FoundSnapshot as FoundSnapshot
    from bootseer.env.store.store import ListedKey as ListedKey
    from bootseer.env.store.store import PublishedSnapshot as PublishedSnapshot
    from bootseer.env.store.store import StoredDocument as StoredDocument

_HOMES = {
    "Captured": "bootseer.env.compile_cache.caches",
    "FirstStepCaches": "bootseer.env.compile_cache.caches",
    "Seeded": "bootseer.env.compile_cache.caches",
    "Built": "bootseer.env.capture.capture",
    "Capture": "bootseer.env.capture.capture",
    "Changes": "bootseer.env.capture.capture",
    "Facts": "bootseer.env.capture.capture",
    "Change": "bootseer.env.key.document",
    "KeyDocument": "bootseer.env.key.document",
    "Explanation": "bootseer.env.key.explain",
    "Keyed": "bootseer.env.key.keying",
    "make_key": "bootseer.env.key.keying",
    "BuilderLease": "bootseer.env.store.lease",
    "LeaseHolder": "bootseer.env.store.lease",
    "Lease": "bootseer.env.store.lease",
    "MountedEnv": "bootseer.env.restore.mounted",
    "mount_env": "bootseer.env.restore.mounted",
    "MountOptions": "bootseer.env.restore.restore",
    "Restored": "bootseer.env.restore.restore",
    "SetupResult": "bootseer.env.service.commands",
    "run_setup": "bootseer.env.service.commands",
    "Snapshot": "bootseer.env.store.snapshot",
    "SetupSpec": "spec",
    "EnvStore": "bootseer.env.store.store",
    "FoundSnapshot": "bootseer.env.store.store",
    "ListedKey": "bootseer.env.store.store",
    "PublishedSnapshot": "bootseer.env.store.store",
    "StoredDocument": "bootseer.env.store.store",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
