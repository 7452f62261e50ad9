"""Loading of a model folder: checks its configuration, reads its graph, plans its memory, and creates its decoder.

The package depends on folders, graphs and memory, but not on text. This module imports nothing.
"""
