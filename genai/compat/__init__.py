"""Compatibility layers for the APIs of other libraries. No lower-level module imports them."""
