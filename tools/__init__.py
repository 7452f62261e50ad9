"""Programs for the people who build this project; nothing here is installed with the library.

Only this folder (and tests/) may import torch or onnxruntime.
"""
