"""From files that set-up has changed to a snapshot."""
