"""Measurements of Bootseer against what it replaces; `python -m bench NAME`."""
