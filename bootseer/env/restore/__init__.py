"""A snapshot on this node: unpacked or mounted."""
