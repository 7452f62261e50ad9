"""Native operators that work on every row alone: norms, element by element functions, gathers.

Each module has a function that checks its arguments and returns a call. Operands are `Rows` (parts of wider rows will
do) and float32 vectors; counts come from the step's context. A machine code operator exists per function and is
compiled when a program first uses it. Knows nothing of operators' attributes, graphs, products or attention.
"""
