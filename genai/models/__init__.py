"""A model folder becomes a model: its configuration is checked, its graph read and planned for, its decoder loaded.

Knows folders, graphs and the memory they take, not text. Nothing is imported here.
"""
