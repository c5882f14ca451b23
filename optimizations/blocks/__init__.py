"""The blocks of a forward pass: the executor, what it prepares for a shape, and CUDA graphs."""
