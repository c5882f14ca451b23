"""Loads Qwen-Image into ComfyUI's own objects: MODEL, CLIP and VAE.

With `nodes/` and `hosts/diffusers`, the only code that imports a host.
"""
