"""NVIDIA GPUs: CUDA C++ kernels in `src`, compiled on the machine that runs them and launched through CuPy.

`sources` reads the kernels and their argument structs, `driver` defines the interface to a GPU (CuPy, or an emulator on
the host in tests), `lowering` turns ops into launches, and `executor` runs them. CuPy is imported only when an executor
is opened.
"""
