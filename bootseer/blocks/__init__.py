"""Blocks of trees on this node: cached, fetched once, in the order of the access trace."""
