"""Fakes, suites and servers for tests and benches."""
