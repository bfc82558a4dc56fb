"""Decisions for the whole job: pure, but for the run file."""
