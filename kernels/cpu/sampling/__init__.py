"""The parts of the sampling kernels: a row of logits, passes over the row, and steps that remove tokens from play.

The package depends on arrays, and on steps and their parameters (`kernels.sampling`); it is independent of options,
requests and text. `row` defines the representation of a row, `passes` read whole rows, and `selection` keeps the first
tokens of an order. `truncation` and `repetition` contain the steps, and `draw` the final draw and the random numbers.
Rows are independent of one another.
"""
