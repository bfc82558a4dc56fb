"""Choice of the DataNode to read a block from or to send a file to, by recent successes and failures. Pure.

The native client does not report which replica it reads. When it stalls or loses a race and another replica sends
the same bytes, the remaining replicas share the blame for a while. Times are seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from bootseer.tuning import DEFAULTS

SUSPECT = 0.5  # share of blame from which a DataNode is avoided: one incident with two replicas, two with three
MAX_SILENT_S = 10  # since a heartbeat; one arrives every 3 s

T = TypeVar("T")


class _Blame(NamedTuple):
    share: float
    since_s: float


class Replicas:
    """Records of the DataNodes of one HDFS, by address."""

    def __init__(self, blame_s: float = DEFAULTS.storage.hdfs_avoid_s) -> None:
        """Args: blame_s: how long to avoid a DataNode; HDFS calls one stale after the same time as the default."""
        self._blame_s = blame_s
        self._blames: dict[str, _Blame] = {}

    def blame(self, addresses: Sequence[str], now_s: float) -> None:
        """Blame one of these for a failure: each gets an equal share."""
        for address in addresses:
            self._blames[address] = _Blame(self._share(address, now_s) + 1.0 / len(addresses), now_s)

    def clear_blame(self, address: str) -> None:
        """Clear the blame of a DataNode that serves."""
        self._blames.pop(address, None)

    def is_suspect(self, address: str, now_s: float) -> bool:
        return self._share(address, now_s) >= SUSPECT

    def any_suspect(self, now_s: float) -> bool:
        """Return whether any is to be avoided now; cheap, as there is rarely any blame."""
        for address in [found for found, blame in self._blames.items() if now_s - blame.since_s > self._blame_s]:
            del self._blames[address]
        return any(blame.share >= SUSPECT for blame in self._blames.values())

    def order(self, addresses: Iterable[str], turn: int, now_s: float) -> list[str]:
        """Order the addresses: good ones first, from the `turn`th on; then suspects, oldest blame first."""
        known = sorted(set(addresses))
        good = [address for address in known if not self.is_suspect(address, now_s)]
        bad = sorted(set(known) - set(good), key=lambda address: self._blames[address].since_s)
        start = turn % len(good) if good else 0
        return good[start:] + good[:start] + bad

    def _share(self, address: str, now_s: float) -> float:
        blame = self._blames.get(address)
        return 0.0 if blame is None or now_s - blame.since_s > self._blame_s else blame.share
