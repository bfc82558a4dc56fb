"""Checkpoints: striped and plain, written in parallel, read once per node."""
