"""Programs for developers of this project. The library is installed without them.

Only this folder and tests/ may import torch or onnxruntime.
"""
