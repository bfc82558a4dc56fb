"""HDFS as a store: libhdfs3-like clients, pyarrow, WebHDFS."""
