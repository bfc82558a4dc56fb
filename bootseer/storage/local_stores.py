"""Stores that are directories, and those of them on a disk of this machine."""

from __future__ import annotations

from bootseer.storage.paths import is_chained, scheme_of


def directory_of(url: str) -> str:
    """Return the directory of a store at this URL, "" if it is not a directory."""
    from bootseer.storage.open import local_path

    is_file = scheme_of(url) in ("", "file", "local") and not is_chained(url)
    return local_path(url) if is_file else ""


def local_disk_directory_of(url: str) -> str:
    """Return it if it is on a disk of this machine: calls to other stores may hang, and load shared servers."""
    from bootseer.linux.page_cache import is_remote

    directory = directory_of(url)
    return directory if directory and not is_remote(directory) else ""
