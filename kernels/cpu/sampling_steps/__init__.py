"""What the sampling kernels are made of: a row of logits, passes over it, and steps that leave fewer tokens in play.

Knows arrays, codes of steps and numbers that steer them (`codes`, `batch`); nothing of options, requests or text. `row`
says how a row is represented, `passes` reads whole rows, `selection` keeps the best of an order; `truncation`,
`exclusion` and `repetition` hold the steps, `draw` the end, `philox` the random numbers. No row depends on another.
"""
