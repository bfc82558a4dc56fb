"""What decides the key of an environment."""
