"""Names of images and artefacts in registries. Pure; they are read where the store of `oci://` needs them."""

from __future__ import annotations

from bootseer.storage.oci_reference import DEFAULT_TAG, DOCKER_HUB, Reference, parse_reference, referrers_tag

__all__ = ["DEFAULT_TAG", "DOCKER_HUB", "Reference", "parse_reference", "referrers_tag"]
