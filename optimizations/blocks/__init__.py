"""Runs the blocks of a forward pass: the executor, its preparation of a shape, and CUDA graphs."""
