"""Which rank a hang waits for, and replays that find a machine."""
