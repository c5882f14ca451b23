"""What diffusers runs of it: nothing."""

PIPELINE, VAE = "ToyPipeline", None
PASSES: dict[type, type] = {}
