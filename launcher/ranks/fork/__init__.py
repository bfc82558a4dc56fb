"""Whether ranks are forked, and what the fork server imports."""
