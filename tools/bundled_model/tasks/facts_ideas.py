"""Facts about the ideas behind the toolkit: graphs, tokens, caches, quantisation, sampling."""

from .fact import Fact

IDEAS = (
    Fact(
        "ONNX is an open file format for neural networks, stored as a graph of operators.",
        things=("ONNX", "an ONNX model", "the ONNX format"),
    ),
    Fact(
        "A graph is a list of operators with named values flowing between them.",
        things=("a graph", "an ONNX graph", "a model graph"),
    ),
    Fact(
        "A token is a small piece of text: a word, a part of a word, or a digit.",
        things=("a token", "tokens", "one token"),
    ),
    Fact(
        "A tokenizer cuts text into tokens and joins tokens into text.",
        things=("a tokenizer", "tokenization", "the job of a tokenizer"),
    ),
    Fact(
        "The KV cache keeps the keys and values of past tokens, so they are computed only once.",
        things=("the KV cache", "KV cache", "a key value cache"),
    ),
    Fact(
        "A paged KV cache stores keys and values in small blocks that grow on demand.",
        things=("a paged KV cache", "the paged KV cache", "paged attention"),
    ),
    Fact(
        "A block table lists the cache blocks that belong to one sequence.",
        things=("a block table", "the block table", "block tables"),
    ),
    Fact(
        "Prefill reads the whole prompt at once and fills the KV cache.",
        things=("prefill", "the prefill step", "the prefill phase"),
    ),
    Fact(
        "Decode makes new tokens one at a time, using the KV cache.",
        things=("decode", "the decode step", "the decode phase"),
    ),
    Fact(
        "Attention lets each token look at the tokens before it.",
        things=("attention", "self-attention", "the attention layer"),
    ),
    Fact(
        "In grouped-query attention, several query heads share one key and value head.",
        things=("GQA", "grouped-query attention", "grouped query attention"),
    ),
    Fact(
        "RoPE turns queries and keys by an angle that depends on their position.",
        things=("RoPE", "rotary embedding", "rotary position embedding"),
    ),
    Fact(
        "RMSNorm divides a vector by its root mean square and scales it.",
        things=("RMSNorm", "RMS norm", "root mean square norm"),
    ),
    Fact(
        "SwiGLU is a feed-forward layer whose gate is passed through SiLU.",
        things=("SwiGLU", "the SwiGLU layer", "a gated feed-forward layer"),
    ),
    Fact(
        "An embedding is the vector that stands for a token.",
        things=("an embedding", "a token embedding", "embeddings"),
    ),
    Fact("Logits are the scores of all possible next tokens.", things=("logits", "the logits", "a logit")),
    Fact(
        "Quantization stores weights with few bits, so a model is smaller and faster.",
        things=("quantization", "quantisation", "a quantized model"),
    ),
    Fact(
        "INT4 stores each weight in four bits, with one scale for each block.",
        things=("INT4", "INT4 quantization", "four-bit quantization"),
    ),
    Fact(
        "INT8 stores each weight in eight bits, with one scale for each block.",
        things=("INT8", "INT8 quantization", "eight-bit quantization"),
    ),
    Fact(
        "A scale is the number that turns small integers back into real weights.",
        things=("a scale", "a quantization scale", "the scale of a block"),
    ),
    Fact(
        "A zero point is the integer that stands for the weight zero.",
        things=("a zero point", "the zero point", "zero points"),
    ),
    Fact(
        "A block is a group of weights that share one scale, often 32 of them.",
        things=("a quantization block", "block size", "the block size", "a weight block"),
    ),
    Fact(
        "LoRA adds small trained matrices to a frozen model.", things=("LoRA", "a LoRA adapter", "low-rank adaptation")
    ),
    Fact(
        "Numba compiles Python functions to fast machine code for the CPU.",
        things=("Numba", "the Numba compiler"),
        questions=("What is Numba used for?", "Why does the toolkit use Numba?"),
    ),
    Fact(
        "CuPy runs array code on NVIDIA GPUs.",
        things=("CuPy", "the CuPy library"),
        questions=("What is CuPy used for?", "Why does the toolkit use CuPy?"),
    ),
    Fact(
        "NumPy is the array library that the toolkit stands on.",
        things=("NumPy", "the NumPy library"),
        questions=("What is NumPy used for?", "Why does the toolkit use NumPy?"),
    ),
    Fact(
        "Temperature makes sampling bolder when high and safer when low.",
        things=("temperature", "sampling temperature", "the temperature"),
    ),
    Fact("Top-k keeps only the k most likely tokens before sampling.", things=("top-k", "top-k sampling", "top k")),
    Fact(
        "Top-p keeps the most likely tokens whose probabilities add up to p.",
        things=("top-p", "top-p sampling", "nucleus sampling"),
    ),
    Fact(
        "Greedy decoding always takes the most likely token.",
        things=("greedy decoding", "greedy search", "greedy sampling"),
    ),
    Fact(
        "A repetition penalty lowers the score of tokens that were already used.",
        things=("a repetition penalty", "the repetition penalty", "repetition penalty"),
    ),
    Fact(
        "The context length is how many tokens a model can see at once. Mine is 1024.",
        things=("the context length", "context length", "your context length", "the context window"),
    ),
    Fact(
        "A system prompt tells the model how to behave before the chat begins.",
        things=("a system prompt", "the system prompt", "a system message"),
    ),
    Fact(
        "A chat template writes a conversation as one text with marks for each role.",
        things=("a chat template", "the chat template", "chat templates"),
    ),
    Fact(
        "A language model predicts the next token from the tokens before it.",
        things=("a language model", "an LLM", "a large language model"),
    ),
    Fact(
        "A kernel is a small fast function that does one operation.", things=("a kernel", "kernels", "a compute kernel")
    ),
    Fact(
        "A plan is the list of steps, in order, that runs a graph.", things=("a plan", "the plan", "an execution plan")
    ),
    Fact("A batch is a group of sequences that are computed together.", things=("a batch", "batching", "batches")),
    Fact(
        "A weight is a number that a model has learned.", things=("a weight", "weights", "model weights", "a parameter")
    ),
)
