"""Runs in diffusers: loads a folder, samples with diffusers' sampler, decodes.

`settings` imports nothing heavy; `load`, `sample` and `decode` import torch and diffusers.
"""
