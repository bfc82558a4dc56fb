"""The daemon that keeps one tree mounted."""
