"""File trees: images and environments as an index and blocks. docs/reference/formats.md describes the format."""
