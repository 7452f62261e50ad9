"""Graph rewrites, one file per family of rules: what each recognises and what it puts in its place.

A rule changes a model in place, keeps what it computes, and says how many changes it made. `base` holds the levels and
the loop that runs rules to a fixed point. Rules know operators' meanings; they do not know kernels or devices.
"""
