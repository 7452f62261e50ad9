"""A device in plain NumPy that defines every op. The device is slow, short, and written to be correct.

Arithmetic is float64. Values between ops are float32, and keys and values have the types of their pages. `sampling`
implements the published definitions of the sampling steps. Fast kernels are tested against this package, and this
package is tested against onnxruntime.
"""
