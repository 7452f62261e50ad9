"""Batches: the input is a file of requests, and a response to each line is written exactly once.

`input_file` reads the input and detects changes to it. `lines` splits it into lines (text, JSON, CSV, Parquet), and
`requests` converts each line to a request. `openai_format` implements the request and response bodies of OpenAI's API.
`journal` is the output file, `run` connects these parts with LLM.map, and `page` renders a report.
"""
