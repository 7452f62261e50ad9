"""The KV cache: block pool, block tables and storage.

`pool` counts references to fixed-size blocks. `table` maps the tokens of a sequence to blocks, which forks share
copy-on-write. `sequence_cache` holds the tables of a sequence and finds blocks that already contain its prefix.
`storage` describes what each layer stores, and holds the memory. The pool and the tables are policy: plain Python
without an array library. This package depends on neither graphs nor text.
"""
