"""Directories as stores."""
