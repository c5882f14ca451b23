"""Holds the version of this package, for what imports neither its nodes nor torch."""

__version__ = "0.2.0"
