"""Programs: operator calls in order, run by all threads of a pool without Python.

`calls` defines programs, `driver` is the machine code that runs them, `thread_pool` owns the threads, and `step_table`
defines the step that all operators read. Operators are independent of threads: they work on a range of items, and an
item's result is the same on every thread. So no result depends on the number of threads.
"""
