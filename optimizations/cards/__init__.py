"""Runs one forward pass on several cards."""
