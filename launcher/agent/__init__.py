"""The agent of a node: carries out the coordinator's orders."""
