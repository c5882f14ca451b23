"""Applies LoRAs to a ComfyUI MODEL: merged into its weights, or as a bypass around them."""
