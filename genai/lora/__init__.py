"""LoRA adapters: they are read from files, bound to the linear layers of a model's program, loaded, and unloaded.

`names` normalises the names of projections, and `targets` finds the projections in a program. `peft`, `gguf` and
`parameters` read files, `bind` converts their content to factors for a program, and `store` manages a model's adapters.
"""
