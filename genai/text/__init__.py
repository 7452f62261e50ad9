"""Text to tokens and back: the tokenizer, its files, its chat templates, ids to whole characters; replies in parts.

It knows the files that Hugging Face and SentencePiece write and what transformers makes of them, not models or
generation; `tokenizer` is the face of it all, `parsing/` takes replies apart. Nothing is imported here, so that
`import genai` stays cheap: the tokenizers library and jinja2 are loaded when a file or template is first used.
"""
