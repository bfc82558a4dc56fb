"""Environment stores: snapshots, leases, garbage collection."""
