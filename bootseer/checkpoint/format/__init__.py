"""The striped format, tensors, and formats of frameworks."""
