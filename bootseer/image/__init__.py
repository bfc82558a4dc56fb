"""Container images: from and to registries, as trees.

Names are imported at their first use, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.image.artifacts import pull_tree as pull_tree
    from bootseer.image.artifacts import push_trace as push_trace
    from bootseer.image.artifacts import push_tree as push_tree
    from bootseer.image.registry import Registry as Registry
    from bootseer.storage.oci.reference import Reference as Reference
    from bootseer.storage.oci.reference import parse_reference as parse_reference

_HOMES = {
    "pull_tree": "artifacts",
    "push_trace": "artifacts",
    "push_tree": "artifacts",
    "Reference": "bootseer.storage.oci.reference",
    "parse_reference": "bootseer.storage.oci.reference",
    "Registry": "registry",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
