"""HTTP as a store."""
