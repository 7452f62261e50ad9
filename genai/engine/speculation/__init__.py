"""Speculation: guesses at the next tokens are computed together with the last one, and kept where they are right.

Where guesses come from (`lookup`, `draft`), when they pay (`policy`), and what the engine calls (`speculator`).
"""
