"""What the sampling kernels are made of: a row of logits, passes over it, and steps that leave fewer tokens in play.

Knows arrays, steps and numbers that steer them (`kernels.sampling`); nothing of options, requests or text. `row` says
how a row is represented, `passes` reads whole rows, `selection` keeps the best of an order; `truncation` and
`repetition` hold the steps, `draw` the end and the random numbers. No row depends on another.
"""
