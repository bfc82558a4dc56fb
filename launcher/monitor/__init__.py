"""What ranks do: hangs, stacks, collectives, failures."""
