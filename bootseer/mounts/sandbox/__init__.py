"""The root file system that ranks of an image enter."""
