"""Runs a fleet of ComfyUI servers: one for each card, started, watched and restarted."""
