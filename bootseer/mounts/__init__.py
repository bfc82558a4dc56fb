"""The kernel side: mounts by FUSE and EROFS, the daemon that serves trees, and the roots of images."""
