"""What went wrong in a job, judged from records of all its ranks. Pure."""
