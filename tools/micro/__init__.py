"""How the bundled micro models are made and judged.

`train` makes one from the configs, words and classes of its folder in models/; `quality` judges it.
"""
