"""Plans and the drivers that walk them.

A plan is a graph compiled once: steps with their kernels, slots for values, constants packed, lifetimes known. A
driver runs a plan, `device` chooses what it runs on. Nothing here knows sequences, sampling or text.
"""
