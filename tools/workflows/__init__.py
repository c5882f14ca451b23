"""Checks the shared workflows, and writes what follows from them.

`workflows/*.json` are the source: ComfyUI's page opens and saves them. Written are the figures in
their notes, `workflows/api/*.json` for servers, and of a file that a page has saved what the page
leaves out.
"""
