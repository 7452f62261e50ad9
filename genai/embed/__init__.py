"""Embeddings of texts and scores of documents, by encoders.

`folder` reads how a model folder turns rows of tokens into vectors, and `pooling` does it. `tokens` encodes texts.
`batches` shares the steps of an encoder between threads. `embedder` and `reranker` are the public classes.
"""
