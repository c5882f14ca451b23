"""A third family, for tests alone: what CONTRIBUTING.md asks of one whose block is known.

Other names and widths than Qwen-Image's, q, k and v in one layer, no biases, text and image as one
stream of rows, and one modulation of shift, scale and gate for all blocks. Qwen-Image's text
encoder and VAE serve it.
"""
