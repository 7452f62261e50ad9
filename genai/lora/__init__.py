"""Low-rank adapters of a model: read from files, bound to the products of its program, loaded, kept and dropped.

`names` knows what projections are called, `targets` finds them in a program, `peft` and `parameters` read files, `bind`
turns what they hold into factors, `store` keeps the adapters of a model by name.
"""
