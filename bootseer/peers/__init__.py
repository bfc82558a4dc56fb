"""Nodes of a job help each other: byte ranges of immutable objects, each out of the store about once a job.

`open_peer_store` gives the store through which a reader asks the other nodes first; `serve.py` is the process that
brings and serves what this node owns. Both follow a private file that the launcher writes (`write_peers`). This
room knows names, ranges and digests, neither trees nor checkpoints. docs/peers.md says how it works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.peers.auth import derive_key as derive_key
    from bootseer.peers.membership import JobPeers as JobPeers
    from bootseer.peers.membership import Node as Node
    from bootseer.peers.membership import Origin as Origin
    from bootseer.peers.membership import write_peers as write_peers
    from bootseer.peers.store import PeerStore as PeerStore
    from bootseer.peers.store import open_peer_store as open_peer_store

_HOMES = {
    "JobPeers": "membership",
    "Node": "membership",
    "Origin": "membership",
    "PeerStore": "store",
    "derive_key": "auth",
    "open_peer_store": "store",
    "write_peers": "membership",
}
__all__ = list(_HOMES)
__getattr__ = loader(__name__, _HOMES)
