"""Graph optimisation: shape inference, and rewrite rules, one file per family.

A rule changes a model in place, preserves its results, and returns the number of changes. `base` contains the levels
and the loop that runs rules to a fixed point. Rules depend on what operators compute, but not on kernels or devices.
"""
