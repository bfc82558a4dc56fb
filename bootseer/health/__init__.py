"""Health checks of a node: facts read through one host interface (`system`), and pure verdicts over them.

`checks` lists them. `runner` runs each in a process with a time limit. docs/guide/checks.md describes each check.
"""
