"""Computes a VAE's image in tiles, and its layers in 2 dimensions."""
