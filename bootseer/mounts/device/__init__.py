"""A tree's EROFS device, served by FUSE."""
