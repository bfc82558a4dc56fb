"""Make a tree of directories and images."""
