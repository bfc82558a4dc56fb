"""What all of bootrun stands on: event loop, job specification, helper processes."""
