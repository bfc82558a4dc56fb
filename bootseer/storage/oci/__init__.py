"""OCI registries as stores."""
