"""The kernel side: FUSE mounts."""
