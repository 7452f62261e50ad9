"""Attention over keys and values in pages: from projected rows to attention's rows, as native operators.

`phases` is the way in: the calls of one layer, for a program; and for each step, how its rows are cut
into work. Inside: `heads` (norm and rotation of one head; new keys and values into their pages), `decode` (splits of
the context, float32), `prefill` (blocks of tokens, by `tile_products` of bfloat16 or `vector_products` of
float32). Knows pages, positions and windows; nothing of graphs, sequences' text or scheduling.
"""
