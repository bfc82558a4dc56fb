"""Which stores are folders, and which of these lie on a disk of this machine."""

from __future__ import annotations

from bootseer.storage.paths import is_chained, scheme_of


def folder_of(url: str) -> str:
    """The folder of a store at this URL, "" for one that is none."""
    from bootseer.storage.open import local_path

    is_file = scheme_of(url) in ("", "file", "local") and not is_chained(url)
    return local_path(url) if is_file else ""


def near_folder_of(url: str) -> str:
    """The same if it lies on a disk of this machine: calls to others may hang, and cost others something."""
    from bootseer.storage.page_cache import is_remote

    folder = folder_of(url)
    return folder if folder and not is_remote(folder) else ""
