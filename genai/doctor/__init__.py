"""Facts about this machine (processor, kernels, memory bandwidth, GPU, caches) and findings based on them.

Each module determines one kind of fact and returns it as a frozen dataclass; `checkup` turns the results into findings
for users. System files are read below a root folder that the caller can set, so that tests can simulate any machine.
Only `model_info` reads models, and only `caches.remove_stale` changes anything on disk.
"""

# Resident memory of a process before it loads a model, with NumPy, onnx and all kernels; more than the value that was
# measured on Linux. The compiler takes 40 MB more while it is loaded, in a process whose kernels are not on disk yet.
PROGRAM_BYTES = 128 * 2**20
