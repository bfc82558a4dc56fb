"""What went wrong in a job: judged from records of all its ranks (pure), or by replays on groups of machines."""
