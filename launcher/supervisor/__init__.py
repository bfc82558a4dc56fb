"""The parent of all ranks of a node, and the agent's side of it."""
