"""Checkpoints that are already quantised: one module per format, and `formats` with the table of all formats."""
