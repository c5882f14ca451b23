"""Makes and judges the bundled micro models.

`train` makes one from the configs, words and classes of its folder in models/; `quality` judges it.
"""
