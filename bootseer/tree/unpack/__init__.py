"""Write the files of a tree to a directory."""
