"""Fakes, suites and servers for tests of Bootseer and of software built on it."""
