"""Files of requests in, files of answers out, each exactly once.

`input_file` is read and watched, `lines` finds the lines in it (text, JSON, CSV, Parquet), `requests` makes each a
request, `openai_format` knows the bodies of OpenAI's API, `journal` is the output, `run` brings them together over
LLM.map, and `page` shows what came of it.
"""
