"""Bytes by URL and range: one protocol, many kinds of stores."""
