"""The process that finds, restores or builds a job's environment."""
