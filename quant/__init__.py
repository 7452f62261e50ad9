"""Weight quantisation: float arrays in, packed integer arrays out.

Layouts are those of the ONNX contrib operators (block-quantised products and tables), so that what is made here can
be written into a model as it is.

Nothing here knows about graphs, checkpoints or the engine, and nothing touches a disk.
"""
