"""Trees that are unpacked, where nothing can be mounted."""
