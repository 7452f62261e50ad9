"""Text processing: tokenizers and their files, chat templates, incremental decoding, and parsing of replies.

The package implements the file formats of Hugging Face and SentencePiece with the semantics of transformers. The
package does not depend on models or generation. `tokenizer` is the main interface, and `parsing/` splits replies. This
module imports nothing, so that `import genai` stays fast: the tokenizers library and jinja2 are imported at first use.
"""
