"""The process that loads a checkpoint for all ranks of a node."""
