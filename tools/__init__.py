"""Programs that ship with the package, so that what they claim can be checked anywhere."""
