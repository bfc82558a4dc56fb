"""Parallel reads of ranges: concurrency, hedging, rates."""
