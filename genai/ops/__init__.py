"""What we know of ONNX operators, one file per family.

For an operator that decoders use, its file says how shapes follow, where the token axis goes, how its weights are
packed, and which op (`genai.kernels.ir`) it becomes; for general graphs it has the function of arrays.
"""
