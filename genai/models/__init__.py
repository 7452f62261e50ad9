"""Model loading: the package checks a folder's configuration, reads the graph, plans the memory, and creates a decoder.

The package depends on folders, graphs and memory, but not on text. This module imports nothing.
"""
