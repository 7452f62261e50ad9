"""What is measured and reported: speed, quality, this machine, and what model folders hold.

`bench/` times models beside what the machine can do at most, `evaluation/` asks how good a model is and where two runs
part, `machine/` knows this machine, `model_info` describes folders and files, `plots` draws results.
"""
