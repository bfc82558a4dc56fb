"""Environments: the changes that set-up commands make to directories, captured once and restored on every node.

docs/reference/formats.md describes the format.
"""
