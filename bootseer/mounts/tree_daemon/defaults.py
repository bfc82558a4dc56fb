"""Defaults of a tree's daemon, for its starter, which does not import its settings (msgspec)."""

DEADLINE_S = 30.0
STREAM_AFTER_S = 10.0  # the remaining blocks are not urgent, and training has just begun
READ_AHEAD_SHARE = 7 / 8
ANY_WORKLOAD = "0" * 16  # as in bootseer.blocks.trace
