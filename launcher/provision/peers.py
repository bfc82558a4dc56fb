"""bootrun's side of peer sharing: this node serves bytes to the job's other nodes, and its readers get the peers.

A separate process (bootseer/peers/serve.py) fetches and serves. It and all readers of this node follow a private
file, which is written here: key, nodes, stores. In: the job's secret, PeerNodes of the coordinator, and from
readers the stores whose objects never change. Out: messages to the coordinator, the file, log lines. A failure
only costs peer sharing: without the file readers read the store.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.own_module import command_of
from launcher.base.helper_process import ServiceProcess
from launcher.base.listen_address import is_ip
from launcher.base.loop import EventLoop
from launcher.rendezvous.messages import PeerNodes
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from bootseer.peers.membership import Origin

MAX_ORIGINS = 64
_FILE, _SPOOL = "peers.json", "spool"


class NodePeers:
    """bootrun's side of peer sharing; made only for jobs on several nodes with a secret and data to read."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        secret: bytes,
        unset: tuple[str, ...],
        fell_back: Callable[[str], object],
    ) -> None:
        """Args: unset: variables that the process does not get; fell_back: receives why only the store is read."""
        self._loop = loop
        self._spec = spec
        self._unset = unset
        self._fell_back = fell_back
        from bootseer.peers import derive_key

        self._key = derive_key(secret, spec.run_id).hex()
        self._process: ServiceProcess | None = None
        self._directory = ""
        self._port = 0
        self._tell: Callable[[int], object] | None = None
        self._known: PeerNodes | None = None
        self._origins: dict[str, Origin] = {}  # by URL

    @property
    def path(self) -> str:
        """The path of the file, which appears and disappears; "" if no peer is used."""
        return os.path.join(self._directory, _FILE) if self._directory else ""

    def begin(self) -> None:
        """Start the serving process, at time zero."""
        above = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  a private directory with a random name
        directory = os.path.join(os.path.abspath(above), f"bootseer-peers-{os.urandom(8).hex()}")
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.peers.serve", os.path.join(directory, _FILE))
        argv += ["--spool", os.path.join(directory, _SPOOL), "--remove-folder"]
        if is_ip(self._spec.local_addr):
            argv += ["--address", self._spec.local_addr]
        if self._spec.peers_upload_bytes_per_s is not None:
            argv += ["--upload-bytes-per-s", str(self._spec.peers_upload_bytes_per_s)]
        try:
            os.mkdir(directory, 0o700)
            self._directory = directory
            self._process = ServiceProcess(self._loop, argv, environ, self._take, self._on_end)
        except OSError as error:
            self._disable(f"the peer process cannot be started: {error.strerror}")

    def connect(self, tell: Callable[[int], object]) -> None:
        """Set the connection to the coordinator. Args: tell: sends it the port of this node, 0 for no longer."""
        self._tell = tell
        if self._port:
            tell(self._port)

    def meet(self, found: PeerNodes) -> None:
        """Record the nodes that serve, this node among them."""
        self._known = found
        self._write()

    def add_origin(self, url: str, directories: Sequence[str]) -> None:
        """Add directories of a store whose objects never change. Args: url: as readers open the store."""
        from bootseer.peers import Origin

        before = self._origins.get(url)
        known = before.below if before is not None else []
        added = [directory for directory in directories if directory not in known]
        if not added or len(self._origins) + len(known) >= MAX_ORIGINS:
            return
        self._origins[url] = Origin(url=url, below=[*known, *added])
        self._write()

    def close(self) -> None:
        """End the process and remove its files; the job is over."""
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._remove()

    # ---- the process -----------------------------------------------------------------------------------------

    def _take(self, answer: dict[str, Any]) -> None:
        port = answer.get("port")
        if isinstance(port, int) and 0 < port < 65536:
            self._port = port
            if self._tell is not None:
                self._tell(port)

    def _on_end(self, why: str) -> None:
        self._process = None
        self._disable(f"the peer process has failed: {why}")

    def _disable(self, why: str) -> None:
        self._fell_back(f"peer sharing disabled on this node: {why}")
        was_serving, self._port = bool(self._port), 0
        if was_serving and self._tell is not None:
            self._tell(0)
        self._remove()

    # ---- the file --------------------------------------------------------------------------------------------

    def _write(self) -> None:
        if not self._port or self._known is None:
            return
        from bootseer.errors import ConfigError
        from bootseer.peers import JobPeers, Node, write_peers

        nodes = [Node(node.id, node.address, node.port) for node in self._known.nodes]
        peers = JobPeers(
            job=self._spec.run_id,
            own=self._known.own,
            key=self._key,
            nodes=nodes,
            origins=list(self._origins.values()),
        )
        try:
            write_peers(self.path, peers)
        except (ConfigError, OSError) as error:
            self._fell_back(f"peer sharing disabled on this node: {error}")

    def _remove(self) -> None:
        directory, self._directory = self._directory, ""
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
