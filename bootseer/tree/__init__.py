"""File trees: images and environments as an index and blocks. docs/formats.md is the format."""
