"""What set-up commands and requirement files say."""
