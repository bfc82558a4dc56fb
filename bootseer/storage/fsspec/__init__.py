"""Any fsspec file system as a store."""
