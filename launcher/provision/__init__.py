"""What ranks need before they start: image, environment, caches, checkpoint, peers."""
