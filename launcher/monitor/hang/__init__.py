"""When a job counts as hung."""
