"""Plans and the drivers that walk them.

A plan is a graph compiled once: steps with their kernels, slots for values, constants packed, lifetimes known. A
driver runs a plan. This room knows graphs and kernels; it knows nothing of sequences, sampling or text.
"""
