"""The diffusers host: load a folder, sample with diffusers' own sampler, decode.

`settings` imports nothing heavy; `load`, `sample` and `decode` import torch and diffusers.
"""
