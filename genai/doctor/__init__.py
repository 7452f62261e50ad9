"""Facts about this machine: processor, kernels, memory bandwidth, GPU, caches; and what follows from them.

Each module finds out one thing and says it as a frozen dataclass; `checkup` turns them into findings for people. Files
of the system are read below a root that the caller may choose, so every machine can be made up in a test. Only
`model_info` knows models; nothing is changed on disk but by `caches.remove_stale`.
"""

# What a process of this toolkit takes before it loads a model: resident memory with NumPy, onnx, Numba and all kernels;
# a little above what was measured on Linux.
PROGRAM_BYTES = 160 * 2**20
