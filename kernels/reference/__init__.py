"""A device in plain NumPy: what every op means, as a person would write it down, slow, short and meant to be right.

Arithmetic is float64; values between ops are float32, and keys and values what their pages hold. `sampling` has the
published definitions of the sampling steps. Fast kernels are tested against all this, all this against onnxruntime.
"""
