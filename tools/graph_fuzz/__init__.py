"""Random graphs against onnxruntime: `python -m tools.graph_fuzz COUNT [--seed N]`."""
