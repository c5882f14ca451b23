"""How the bundled micro Qwen-Image is made and judged.

Scenes and their words, the painter, the judge, the training.
"""
