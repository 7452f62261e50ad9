"""Programs: operator calls in order, run by all threads of a pool without Python.

`calls` is what programs are made of, `driver` is the machine code that runs one, `pool` owns the threads, `context` is
the step that all operators read. Operators know nothing of threads: they work on a range of items, and every item's
result is the same whoever computes it, so it does not depend on the number of threads.
"""
