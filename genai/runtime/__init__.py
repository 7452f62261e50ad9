"""Plans and the drivers that run them.

A plan is a graph compiled once: calls of its kernels, slots for values, constants packed, lifetimes known. A
driver runs a plan, `device` chooses what it runs on. Nothing here knows sequences, sampling or text.
"""
