"""Traces of collectives and what accelerators do."""
