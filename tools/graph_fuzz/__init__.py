"""A comparison of random graphs with onnxruntime: `python -m tools.graph_fuzz COUNT`, with the options of `--help`."""
