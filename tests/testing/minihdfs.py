"""A real HDFS on this machine for tests and benches: one NameNode, some DataNodes, each a Java process.

`with MiniHdfs(folder) as hdfs:` gives `hdfs.url` (hdfs://...) and `hdfs.web_url` (webhdfs://...). DataNodes can be
killed, frozen, slowed, restarted, have blocks corrupted, or be placed behind links of a set rate. It needs a JDK;
minihdfs_jars fetches the jars. All processes end with the program that started them, even if it is killed.
"""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from tests.testing import minihdfs_jars
from tests.testing.minihdfs_net import CappedLinks, Loopback, Net
from tests.testing.minihdfs_nodes import (
    Block,
    DataNode,
    MiniHdfsError,
    Server,
    Starter,
    get_json,
    read_bean,
    wait_until,
)

STALE_S = 30.0  # HDFS's own default
_JAVA = ("java", "-Xmx256m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"

START_TRIES = 3

why_not = minihdfs_jars.why_not


class MiniHdfs:
    """A cluster in `folder`; a context manager.

    Args:
        stale_s: time without a heartbeat after which a DataNode is listed last. The default is HDFS's own.
        rate_mbit: one rate for all, or one for each DataNode: links capped in both directions (needs root).
            Programs reach such a cluster only if `client_prefix` precedes their command.
        options: any other key of hdfs-site.xml.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        datanodes: int = 3,
        replication: int = 2,
        block_bytes: int = 16 << 20,
        stale_s: float = STALE_S,
        permissions: bool = False,
        rate_mbit: float | Sequence[float] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = os.path.abspath(folder)
        self._tmp = os.path.join(self._directory, "tmp")
        self._count = datanodes
        self._kit = minihdfs_jars.fetch_kit()
        self._rates = rate_mbit
        self._settings = {
            "dfs.replication": str(replication),
            "dfs.blocksize": str(block_bytes),
            "dfs.namenode.stale.datanode.interval": str(round(stale_s * 1000)),
            "dfs.permissions.enabled": str(permissions).lower(),
        }
        if stale_s != STALE_S:
            self._settings |= {
                "dfs.namenode.stale.datanode.minimum.interval": "2",
                "dfs.namenode.avoid.read.stale.datanode": "true",
                "dfs.namenode.avoid.write.stale.datanode": "true",
                "dfs.namenode.write.stale.datanode.ratio": "1.0",
            }
        self._options = dict(options or {})
        self._net: Net | None = None
        self._namenode: Server | None = None
        self._web_port = 0
        self._starter = Starter()
        self.url = ""
        self.web_url = ""
        self.datanodes: list[DataNode] = []

    def __enter__(self) -> MiniHdfs:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def client_prefix(self) -> list[str]:
        """Return the command prefix of programs that connect to a capped cluster."""
        return self._made_net().prefix(0)

    @property
    def conf_folder(self) -> str:
        """Return the directory for HADOOP_CONF_DIR."""
        return os.path.join(self._directory, "conf")

    def start(self) -> None:
        """Start an empty file system; return when all DataNodes have registered."""
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._start()
                break
            except MiniHdfsError as error:
                if not tries_left or "BindException" not in str(error):
                    raise
                self._discard()  # another process took a port between its choice and Java's start

    def _start(self) -> None:
        self._net = net = CappedLinks(self._rate_of_each()) if self._rates is not None else Loopback()
        host = net.address(0)
        rpc_port, self._web_port = _free_ports(net, host, 2)
        self.url = f"hdfs://{host}:{rpc_port}"
        self.web_url = f"webhdfs://{host}:{self._web_port}"
        conf = self._write_conf(rpc_port)
        java = [*_JAVA, f"-Djava.io.tmpdir={self._tmp}", "-cp", ":".join(self._kit.jars)]
        namenode = [*net.prefix(0), *java, minihdfs_jars.NAMENODE, "-conf", conf]
        for number in range(self._count):
            self.datanodes.append(self._make_datanode(number, net, conf))
            self.datanodes[-1].start()  # they retry until there is a NameNode
        shutil.copytree(self._kit.formatted, os.path.join(self._directory, "name"))
        self._namenode = Server(
            self._starter, "the NameNode", namenode, os.path.join(self._directory, "namenode.log")
        )
        self._namenode.start()
        self._wait_ready(dict.fromkeys(self.datanodes, 0))

    def stop(self) -> None:
        """End all processes at once and remove the network."""
        self._kill()
        self._starter.close()

    def _kill(self) -> None:
        for node in self.datanodes:
            node.kill()
        if self._namenode is not None:
            self._namenode.kill()
        if self._net is not None:
            self._net.close()

    def _discard(self) -> None:
        """Remove what a failed start has left."""
        self._kill()
        self.datanodes.clear()
        self._namenode = None
        shutil.rmtree(self._directory)
        os.mkdir(self._directory)

    def restart(self, node: DataNode) -> None:
        """Restart a DataNode, or start it; return when the NameNode knows its blocks again."""
        node.kill()
        reported = self._reports(node)
        node.start()
        self._wait_ready({node: reported})

    def restart_namenode(self) -> None:
        """Restart the NameNode; return when it serves again. All files are preserved."""
        self.kill_namenode()
        self.start_namenode()

    def start_namenode(self) -> None:
        """Start the NameNode after `kill_namenode`; return when it serves."""
        reported = {node: self._reports(node) for node in self.datanodes if node.is_running()}
        self._started_namenode().start()
        self._wait_ready(reported)

    def kill_namenode(self) -> None:
        """Kill the NameNode as kill -9 does."""
        self._started_namenode().kill()

    def freeze_namenode(self) -> None:
        """Freeze the NameNode: it holds its connections and answers nothing until `thaw_namenode`."""
        self._started_namenode().freeze()

    def thaw_namenode(self) -> None:
        self._started_namenode().thaw()

    def jmx(self, bean: str) -> dict[str, Any]:
        """Return a bean of the NameNode."""
        net = self._made_net()
        return read_bean(net, net.address(0), self._web_port, bean)

    def blocks(self, path: str) -> list[Block]:
        """Return the blocks of a file and their locations; `path` from the root of the file system."""
        net = self._made_net()
        query = f"/webhdfs/v1/{quote(path.strip('/'))}?op=GET_BLOCK_LOCATIONS&user.name={_user()}"
        answer = get_json(net, net.address(0), self._web_port, query)
        if "LocatedBlocks" not in answer:
            raise MiniHdfsError(f"no blocks of {path}: {answer}")
        return [
            Block(
                found["block"]["blockId"],
                found["startOffset"],
                found["block"]["numBytes"],
                tuple(place["ipAddr"] for place in found["locations"]),
            )
            for found in answer["LocatedBlocks"]["locatedBlocks"]
        ]

    def corrupt(self, path: str, *, block: int = 0, replicas: int = 1, offset: int = 0) -> list[DataNode]:
        """Flip a byte on disk in `replicas` replicas of a block; return the affected DataNodes."""
        damaged: list[DataNode] = []
        for node in self.datanodes:
            file_path = node.block_file(self.blocks(path)[block])
            if file_path is not None and len(damaged) < replicas:
                with open(file_path, "r+b", buffering=0) as file:
                    byte = os.pread(file.fileno(), 1, offset)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), offset)
                damaged.append(node)
        if len(damaged) < replicas:
            raise MiniHdfsError(f"block {block} of {path} has {len(damaged)} replicas on disk, not {replicas}")
        return damaged

    def _reports(self, node: DataNode) -> int:
        """Count the block reports that the NameNode has received from this DataNode."""
        return self._started_namenode().count_lines("BLOCK* processReport: from storage", f"({node.address}:")

    def _wait_ready(self, reported: Mapping[DataNode, int]) -> None:
        """Wait until the NameNode serves and each of these DataNodes has reported its blocks again."""

        def is_ready() -> bool:
            namenode = self._started_namenode()
            if not namenode.is_running():
                raise MiniHdfsError(f"the NameNode has ended: {namenode.last_words()}")
            for node, count in reported.items():
                if not node.is_running():
                    raise MiniHdfsError(f"datanode{node.number} has ended: {node.last_words()}")
                if self._reports(node) <= count:
                    return False
            try:
                return self.jmx("Hadoop:service=NameNode,name=NameNodeInfo").get("Safemode") == ""
            except (OSError, http.client.HTTPException):
                return False

        wait_until(is_ready, "the NameNode and its DataNodes")

    def _make_datanode(self, number: int, net: Net, conf: str) -> DataNode:
        host, name = number + 1, f"datanode{number}"
        address = net.address(host)
        data_port, ipc_port, web_port = _free_ports(net, address, 3)
        directory = os.path.join(self._directory, name)
        settings = {
            "dfs.datanode.data.dir": f"file://{directory}",
            "dfs.datanode.address": f"{address}:{data_port}",
            "dfs.datanode.ipc.address": f"{address}:{ipc_port}",
            "dfs.datanode.http.address": f"{address}:{web_port}",
            "dfs.datanode.hostname": address,  # used in redirects
            "hadoop.rpc.socket.factory.class.default": minihdfs_jars.SOCKET_FACTORY,
        }
        flags = [flag for key, value in settings.items() for flag in ("-D", f"{key}={value}")]
        java = [*_JAVA, f"-Djava.io.tmpdir={self._tmp}", f"-Dbootseer.address={address}"]
        java += ["-cp", ":".join(self._kit.jars)]
        argv = [*net.prefix(host), *java, _DATANODE, "-conf", conf, *flags]
        server = Server(self._starter, name, argv, os.path.join(self._directory, f"{name}.log"))
        return DataNode(number, net, server, address, web_port, directory)

    def _write_conf(self, rpc_port: int) -> str:
        host = self._made_net().address(0)
        common = {"fs.defaultFS": self.url, "hadoop.tmp.dir": self._tmp}
        settings = {
            "dfs.namenode.rpc-address": f"{host}:{rpc_port}",
            "dfs.namenode.http-address": f"{host}:{self._web_port}",
            "dfs.namenode.name.dir": f"file://{self._directory}/name",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.webhdfs.enabled": "true",
            "dfs.namenode.fs-limits.min-block-size": "1024",  # small blocks in tests
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.edits.noeditlogchannelflush": "true",  # no fsync
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.replication.interval": "1",
            "dfs.namenode.handler.count": "4",
            "dfs.datanode.directoryscan.interval": "-1",
            "dfs.block.scanner.volume.bytes.per.second": "0",
            **self._settings,
            **self._options,
        }
        os.makedirs(self.conf_folder)
        os.mkdir(self._tmp)
        for name, content in (
            ("core-site.xml", common),
            ("hdfs-site.xml", settings),
            ("all.xml", common | settings),
        ):
            with open(os.path.join(self.conf_folder, name), "w", encoding="utf-8") as file:
                file.write("<configuration>\n")
                for key, value in content.items():
                    file.write(f"<property><name>{key}</name><value>{escape(value)}</value></property>\n")
                file.write("</configuration>\n")
        return os.path.join(self.conf_folder, "all.xml")

    def _rate_of_each(self) -> list[float]:
        if isinstance(self._rates, Sequence):
            if len(self._rates) != self._count:
                raise MiniHdfsError(f"{len(self._rates)} rates for {self._count} DataNodes")
            return list(self._rates)
        return [float(self._rates or 0)] * self._count

    def _made_net(self) -> Net:
        if self._net is None:
            raise MiniHdfsError("the HDFS was not started")
        return self._net

    def _started_namenode(self) -> Server:
        if self._namenode is None:
            raise MiniHdfsError("the HDFS was not started")
        return self._namenode


def _user() -> str:
    return os.environ.get("HADOOP_USER_NAME") or os.environ.get("USER") or "root"


def _free_ports(net: Net, address: str, count: int) -> list[int]:
    """Return ports that can be bound there, below the kernel's ephemeral ports."""
    if isinstance(net, CappedLinks):
        return [9800 + number for number in range(count)]  # the namespace is empty
    found: list[int] = []
    while len(found) < count:
        port = 10000 + secrets.randbelow(22000)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
