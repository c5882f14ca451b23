"""One forward pass on several cards."""
