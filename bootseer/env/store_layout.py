"""The layout of an environment store: names of directories and files below its root. Pure.

    keys/KEY/key.json, env-NNNNNN.json, lease-NNNNNN.json, used
    trees/KEY/index, packs, traces, used/TREE
    reads/KEY/key.json, reads-NNNNNN.json, used        KEY: of the first guess

In: keys and numbers. Out: paths, and the numbers in names of files.
"""

from __future__ import annotations

import re

from bootseer.errors import ConfigError
from bootseer.storage.paths import is_chained
from bootseer.tree.head import is_digest

KEYS, TREES, READS = "keys", "trees", "reads"
DOCUMENT, USED = "key.json", "used"
MAX_NUMBER = 999_999
_NUMBERED = re.compile(r"(env|lease|reads)-([0-9]{6})\.json")


def is_key(text: str) -> bool:
    """Return whether a text can be the key of an environment: 64 lower-case hex digits."""
    return is_digest(text)


def check_key(key: str) -> str:
    """Return the key itself. Raises: ConfigError."""
    if not is_key(key):
        raise ConfigError(f"{key[:80]!r} is not a key of an environment; a key has 64 hex digits")
    return key


def key_folder(key: str) -> str:
    return f"{KEYS}/{check_key(key)}"


def tree_directory(key: str) -> str:
    return f"{TREES}/{check_key(key)}"


def reads_directory(guess: str) -> str:
    return f"{READS}/{check_key(guess)}"


def reads_path(guess: str, number: int) -> str:
    return f"{reads_directory(guess)}/reads-{_check_number(guess, number):06d}.json"


def document_path(key: str) -> str:
    return f"{key_folder(key)}/{DOCUMENT}"


def used_path(key: str) -> str:
    return f"{key_folder(key)}/{USED}"


def tree_used_path(key: str, tree: str) -> str:
    """Return the path of the stamp of jobs that have a tree mounted."""
    return f"{tree_used_directory(key)}/{tree}"


def tree_used_directory(key: str) -> str:
    return f"{tree_directory(key)}/{USED}"


def env_path(key: str, number: int) -> str:
    return f"{key_folder(key)}/env-{_check_number(key, number):06d}.json"


def lease_path(key: str, number: int) -> str:
    return f"{key_folder(key)}/lease-{_check_number(key, number):06d}.json"


def generation_of(name: str) -> int:
    """Return the number of env-NNNNNN.json; 0 for any other name."""
    return _number_of(name, "env")


def lease_number_of(name: str) -> int:
    """Return the number of lease-NNNNNN.json; 0 for any other name."""
    return _number_of(name, "lease")


def reads_number_of(name: str) -> int:
    """Return the number of reads-NNNNNN.json; 0 for any other name."""
    return _number_of(name, "reads")


def below(url: str, directory: str) -> str:
    """Return the URL of a directory below that of `url`; a query stays at the end, a chain keeps its tail."""
    if is_chained(url):
        first, mark, rest = url.partition("::")
        return f"{below(first, directory)}{mark}{rest}"
    path, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    return f"{path.rstrip('/')}/{directory}{mark}{query}"


def _check_number(key: str, number: int) -> int:
    if not 1 <= number <= MAX_NUMBER:
        raise ConfigError(f"{KEYS}/{key}: number {number} is not in 1 to {MAX_NUMBER}; delete this directory")
    return number


def _number_of(name: str, kind: str) -> int:
    found = _NUMBERED.fullmatch(name)
    return int(found[2]) if found is not None and found[1] == kind else 0
