"""Holds programs that ship with the package, so that its claims can be checked anywhere."""
