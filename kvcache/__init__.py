"""Where keys and values live: blocks, tables, groups, memory.

`pool` counts references to fixed-size blocks, `table` maps one sequence's tokens to blocks (copy-on-write when forked),
`prefix` finds blocks that already hold a token prefix, `groups` says what a layer stores, `storage` holds the bytes and
`budget` how many fit. Pool, table, prefix and groups are policy: plain Python without an array library. Nothing here
knows graphs, kernels or text.
"""
