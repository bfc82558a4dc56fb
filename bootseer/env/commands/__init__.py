"""What the commands of `bootseer env` do."""
