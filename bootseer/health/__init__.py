"""Health checks of a node: what the machine says, read through one door, and pure verdicts over it.

`checks` lists them, `runner` runs each in a process with a time limit; docs/checks.md says what each looks at.
"""
