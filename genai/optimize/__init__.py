"""Graph optimisation: shape inference, and rewrites, one file per family: what each recognises and what it becomes.

A rule changes a model in place, keeps what it computes, and says how many changes it made. `base` holds the levels and
the loop that runs rules to a fixed point. Rules know operators' meanings; they do not know kernels or devices.
"""
