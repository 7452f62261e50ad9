"""A tape: native operators in a row, walked by all threads of a team without Python.

`program` writes tapes, `driver` is the machine code that walks one, `team` owns the threads, `context` is the step that
all operators read. Operators know nothing of threads: they work on a range of items, and every item's result is the
same whoever computes it, so it does not depend on the number of threads.
"""
