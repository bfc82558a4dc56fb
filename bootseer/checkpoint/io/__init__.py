"""Bytes of checkpoints in and out of memory."""
