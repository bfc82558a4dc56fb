"""HDFS by pyarrow and libhdfs (Hadoop's C library over a JVM), where hdfs-native is not installed.

It opens as any other fsspec file system. Its calls run in threads with a deadline. It cannot choose DataNodes,
joins files by copying them, and its JVM does not survive a fork.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from bootseer.storage.fsspec.store import FsspecStore
from bootseer.storage.hdfs.conf import HdfsAddress


def why_not(environ: Mapping[str, str]) -> str:
    """Return why it is unusable here, or "" if it seems usable. Loads nothing."""
    for package in ("pyarrow", "fsspec"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    directories = [environ.get("ARROW_LIBHDFS_DIR", "")]
    if home := environ.get("HADOOP_HOME"):
        directories.append(os.path.join(home, "lib/native"))
    if not any(directory and os.path.exists(os.path.join(directory, "libhdfs.so")) for directory in directories):
        return "there is no libhdfs.so in $ARROW_LIBHDFS_DIR or $HADOOP_HOME/lib/native"
    return ""


def open_arrow(address: HdfsAddress, *, timeout_s: float) -> FsspecStore:
    """Open the directory of the address. The first call raises errors of libhdfs and the JVM."""
    netloc = address.native.partition("://")[2]
    url = f"arrow_hdfs://{netloc}{address.folder}"
    return FsspecStore(url, timeout_s=timeout_s, options={"user": address.user})
