"""The record of one failure."""
