"""Command lines: bootrun's flags, the groups of `bootseer`, and completion."""
