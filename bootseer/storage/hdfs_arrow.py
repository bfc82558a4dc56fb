"""HDFS by pyarrow and libhdfs, Hadoop's own C library over a JVM: where hdfs-native is not installed but they are.

It is opened as any other fsspec file system. Its calls run in threads with a deadline, but it has no choice of
DataNodes, joins files by copying them, and its JVM does not survive a fork.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from bootseer.storage.fsspec import FsspecStore
from bootseer.storage.hdfs_conf import HdfsAddress


def why_not(environ: Mapping[str, str]) -> str:
    """Why it cannot be used here, "" when it seems it can; nothing is loaded."""
    for package in ("pyarrow", "fsspec"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    folders = [environ.get("ARROW_LIBHDFS_DIR", "")]
    if home := environ.get("HADOOP_HOME"):
        folders.append(os.path.join(home, "lib/native"))
    if not any(folder and os.path.exists(os.path.join(folder, "libhdfs.so")) for folder in folders):
        return "there is no libhdfs.so in $ARROW_LIBHDFS_DIR or $HADOOP_HOME/lib/native"
    return ""


def open_arrow(address: HdfsAddress, *, timeout_s: float) -> FsspecStore:
    """The folder of the address. Errors of libhdfs and the JVM come with the first call."""
    netloc = address.native.partition("://")[2]
    url = f"arrow_hdfs://{netloc}{address.folder}"
    return FsspecStore(url, timeout_s=timeout_s, options={"user": address.user})
