"""What is read of a rank: stats page, heartbeats, stacks, processes."""
