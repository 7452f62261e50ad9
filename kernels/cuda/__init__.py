"""NVIDIA GPUs: CUDA C++ in `src`, compiled on the machine that runs it, launched through CuPy.

`sources` reads the kernels and what arguments they take, `driver` says what a GPU is to the rest (CuPy, or a host that
emulates one in tests), `lowering` turns ops into launches, `executor` runs them. Nothing imports CuPy before an
executor is opened.
"""
