"""Peer sharing between the nodes of a job: each byte range of an immutable object leaves the store about once per
job.

`open_peer_store` returns a store through which a reader queries the other nodes first. `serve.py` is the process
that fetches and serves the spans of this node. Both follow a private file that the launcher writes
(`write_peers`). This package handles names, ranges and digests, not trees or checkpoints. See docs/guide/peers.md.
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
