"""Command lines: bootrun's flags, the groups of `bootseer`, completion and man pages."""
