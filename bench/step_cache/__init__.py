"""Rules for skipping steps of a sampling run, compared on the bundled micro model."""
