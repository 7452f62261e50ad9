"""Every operator in plain NumPy, with float64 inside: slow, short and meant to be obviously right.

Fast kernels are tested against these functions, these functions against onnxruntime. They take dense tensors and the
attributes of the operator's contract as keywords, and return arrays of the type of their first floating-point input.
They know nothing of packed layouts, except `paged`, which reads pages.
"""
