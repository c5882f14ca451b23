"""Checks `workflows/*.json`, which ComfyUI's page saves, and writes what follows from them."""
