"""What the keeper of a job's environment needs to mount one: a holder, where this user may mount at all."""

from __future__ import annotations

from bootseer.errors import BootseerError
from bootseer.mounts.holder import Holder
from bootseer.mounts.image_source import may_mount


def make_holder() -> Holder | None:
    """Forks it; to be called before this process has threads. None: nothing is mounted."""
    if not may_mount():
        return None
    try:
        return Holder()
    except BootseerError:
        return None
