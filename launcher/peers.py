"""bootrun's side of peers: has this node serve bytes to the others of its job, and tells its readers who they are.

A process of its own (bootseer/peers/serve.py) brings and serves; it and all readers of this node follow a private
file, which is written here: key, nodes, stores. In: the job's secret, PeerNodes of the coordinator, stores whose
objects never change, from whoever reads them. Out: news for the coordinator, the file, lines. What fails costs
help and nothing else: without the file readers read the store.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.own_module import command_of
from launcher.loop import EventLoop
from launcher.rendezvous.messages import PeerNodes
from launcher.rendezvous.serving import is_ip
from launcher.service import ServiceProcess
from launcher.spec import LaunchSpec

if TYPE_CHECKING:
    from bootseer.peers.membership import Origin

MOST_ORIGINS = 64
_FILE, _SPOOL = "peers.json", "spool"


class NodePeers:
    """See the module's docstring; made only for jobs of several nodes that have a secret and something to read."""

    def __init__(
        self,
        loop: EventLoop,
        spec: LaunchSpec,
        secret: bytes,
        unset: tuple[str, ...],
        fell_back: Callable[[str], object],
    ) -> None:
        """Args: unset: variables that the process does not get; fell_back: told why the store alone is read."""
        self._loop = loop
        self._spec = spec
        self._unset = unset
        self._fell_back = fell_back
        from bootseer.peers import derive_key

        self._key = derive_key(secret, spec.run_id).hex()
        self._process: ServiceProcess | None = None
        self._folder = ""
        self._port = 0
        self._tell: Callable[[int], object] | None = None
        self._known: PeerNodes | None = None
        self._origins: dict[str, Origin] = {}  # by URL

    @property
    def path(self) -> str:
        """Of the file, which comes and goes; "" when nobody will be asked."""
        return os.path.join(self._folder, _FILE) if self._folder else ""

    def begin(self) -> None:
        """Time zero: starts the process that serves."""
        above = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  a folder of our own, with a name nobody knows
        folder = os.path.join(os.path.abspath(above), f"bootseer-peers-{os.urandom(8).hex()}")
        environ = {name: value for name, value in os.environ.items() if name not in self._unset}
        argv = command_of("bootseer.peers.serve", os.path.join(folder, _FILE))
        argv += ["--spool", os.path.join(folder, _SPOOL), "--remove-folder"]
        if is_ip(self._spec.local_addr):
            argv += ["--address", self._spec.local_addr]
        if self._spec.peers_upload_bytes_per_s is not None:
            argv += ["--upload-bytes-per-s", str(self._spec.peers_upload_bytes_per_s)]
        try:
            os.mkdir(folder, 0o700)
            self._folder = folder
            self._process = ServiceProcess(self._loop, argv, environ, self._take, self._on_end)
        except OSError as error:
            self._go_without(f"their process cannot be started: {error.strerror}")

    def connect(self, tell: Callable[[int], object]) -> None:
        """The coordinator is there. Args: tell: it the port at which this node serves, 0 for no longer."""
        self._tell = tell
        if self._port:
            tell(self._port)

    def meet(self, found: PeerNodes) -> None:
        """Who serves by now, this node among them."""
        self._known = found
        self._write()

    def add_origin(self, url: str, folders: Sequence[str]) -> None:
        """Of a store, as readers open it, folders whose objects never change."""
        from bootseer.peers import Origin

        before = self._origins.get(url)
        known = before.below if before is not None else []
        added = [folder for folder in folders if folder not in known]
        if not added or len(self._origins) + len(known) >= MOST_ORIGINS:
            return
        self._origins[url] = Origin(url=url, below=[*known, *added])
        self._write()

    def close(self) -> None:
        """The job is over: nobody asks any more, and nothing is left."""
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
        self._go_without(f"their process has failed: {why}")

    def _go_without(self, why: str) -> None:
        self._fell_back(f"this node neither helps other nodes nor is helped: {why}")
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
            self._fell_back(f"nodes do not help each other here: {error}")

    def _remove(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
