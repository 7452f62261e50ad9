"""Checkpoints whose weights others have quantised: one file per format, and `formats` with the table of them."""
