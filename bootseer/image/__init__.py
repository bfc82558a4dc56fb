"""Container images: from and to registries, as trees.

Names are loaded when first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.image.artifacts import Pulled as Pulled
    from bootseer.image.artifacts import Pushed as Pushed
    from bootseer.image.artifacts import pull_tree as pull_tree
    from bootseer.image.artifacts import push_trace as push_trace
    from bootseer.image.artifacts import push_tree as push_tree
    from bootseer.image.references import Reference as Reference
    from bootseer.image.references import parse_reference as parse_reference
    from bootseer.image.registry import Registry as Registry
    from bootseer.image.registry import RegistryImage as RegistryImage

_HOMES = {
    "Pulled": "artifacts",
    "Pushed": "artifacts",
    "pull_tree": "artifacts",
    "push_trace": "artifacts",
    "push_tree": "artifacts",
    "Reference": "references",
    "parse_reference": "references",
    "Registry": "registry",
    "RegistryImage": "registry",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
