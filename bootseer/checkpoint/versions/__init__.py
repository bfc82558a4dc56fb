"""Which version a URL means, and whether it is complete."""
