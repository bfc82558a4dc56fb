"""What set-up reads, observed and compared."""
