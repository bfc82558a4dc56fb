"""Checkpoints as files, by libfuse."""
