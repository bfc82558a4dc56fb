"""Files that run in ranks, by path: standard library only, Python 3.8."""
