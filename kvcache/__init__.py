"""Where keys and values live: blocks, tables, memory.

`pool` counts references to fixed-size blocks, `table` maps one sequence's tokens to blocks (copy-on-write when forked)
and finds those that already hold a prefix of it, `storage` says what a layer keeps and holds the bytes, `budget` how
many fit. Pool and table are policy: plain Python without an array library. Nothing here knows graphs, kernels or text.
"""
