"""Environments: what set-up commands did to folders, captured once and restored everywhere.

Names are loaded when first used. Functions that have the name of their module are taken from it:
`bootseer.env.explain`, `restore`, `snapshot`, `document`, `markers`. docs/formats.md is the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.env.caches import Captured as Captured
    from bootseer.env.caches import FirstStepCaches as FirstStepCaches
    from bootseer.env.caches import Seeded as Seeded
    from bootseer.env.capture import Built as Built
    from bootseer.env.capture import Capture as Capture
    from bootseer.env.capture import Changes as Changes
    from bootseer.env.capture import Facts as Facts
    from bootseer.env.document import Change as Change
    from bootseer.env.document import KeyDocument as KeyDocument
    from bootseer.env.explain import Explanation as Explanation
    from bootseer.env.keying import Keyed as Keyed
    from bootseer.env.keying import make_key as make_key
    from bootseer.env.lease import BuilderLease as BuilderLease
    from bootseer.env.lease import Holder as Holder
    from bootseer.env.lease import Lease as Lease
    from bootseer.env.mounted import MountedEnv as MountedEnv
    from bootseer.env.mounted import mount_env as mount_env
    from bootseer.env.restore import Mounting as Mounting
    from bootseer.env.restore import Restored as Restored
    from bootseer.env.setup_run import SetupResult as SetupResult
    from bootseer.env.setup_run import run_setup as run_setup
    from bootseer.env.snapshot import Snapshot as Snapshot
    from bootseer.env.spec import SetupSpec as SetupSpec
    from bootseer.env.store import EnvStore as EnvStore
    from bootseer.env.store import Found as Found
    from bootseer.env.store import Listed as Listed
    from bootseer.env.store import Published as Published
    from bootseer.env.store import StoredDocument as StoredDocument

_HOMES = {
    "Captured": "caches",
    "FirstStepCaches": "caches",
    "Seeded": "caches",
    "Built": "capture",
    "Capture": "capture",
    "Changes": "capture",
    "Facts": "capture",
    "Change": "document",
    "KeyDocument": "document",
    "Explanation": "explain",
    "Keyed": "keying",
    "make_key": "keying",
    "BuilderLease": "lease",
    "Holder": "lease",
    "Lease": "lease",
    "MountedEnv": "mounted",
    "mount_env": "mounted",
    "Mounting": "restore",
    "Restored": "restore",
    "SetupResult": "setup_run",
    "run_setup": "setup_run",
    "Snapshot": "snapshot",
    "SetupSpec": "spec",
    "EnvStore": "store",
    "Found": "store",
    "Listed": "store",
    "Published": "store",
    "StoredDocument": "store",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
