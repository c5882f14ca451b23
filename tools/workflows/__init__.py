"""Writes the shared workflows: `workflows/*.json` for the page, `workflows/api/*.json` for servers.

Both forms and the notes come from one description of each graph, so that they cannot differ. A test
writes them again and finds no difference.
"""
