"""What a tokenizer is made of: its files, its chat templates, and the way from ids back to whole characters.

It knows the files that Hugging Face and SentencePiece write and what transformers makes of them. It does not know
models, prompts in progress or generation; `genai.tokenizer` is the face of it all. Nothing is imported here, so that
`import genai` stays cheap: the tokenizers library and jinja2 are loaded when a file or template is first used.
"""
