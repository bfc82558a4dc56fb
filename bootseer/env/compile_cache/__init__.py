"""Caches of the first step: what is kept, merged, published."""
