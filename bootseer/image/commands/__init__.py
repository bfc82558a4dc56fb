"""What the commands of `bootseer image` do."""
