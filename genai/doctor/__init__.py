"""Facts about this machine (processor, kernels, memory bandwidth, GPU, caches) and findings based on them.

Each module determines one kind of fact and returns it as a frozen dataclass; `checkup` turns the results into findings
for users. System files are read below a root folder that the caller can set, so that tests can simulate any machine.
Only `model_info` reads models, and only `caches.remove_stale` changes anything on disk.
"""

# Resident memory of a process before it loads a model, with NumPy, onnx, Numba and all kernels; slightly more than the
# value that was measured on Linux.
PROGRAM_BYTES = 160 * 2**20
