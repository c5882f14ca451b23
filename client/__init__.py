"""The client of a ComfyUI server: workflows posted, followed and their results fetched."""
