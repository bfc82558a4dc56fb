"""The commands of the `bootseer` program, one file a group."""
