"""Fakes, suites and servers for tests of Bootseer and of what is built on it."""
