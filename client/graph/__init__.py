"""Workflow graphs: reading them, setting their inputs, checking them, and the images they name."""
