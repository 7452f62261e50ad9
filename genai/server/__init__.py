"""`genai serve`: an HTTP server for the wire formats of OpenAI and others, on one engine.

A module of `wire` decodes a request to a `Turn`; `turns` runs it and yields `events`; the module encodes the events as
one JSON object, or as frames of a stream (`sse`). `serving` holds the model, and `app` the routes. `admission` queues
requests, and `run` starts uvicorn. The extra `serve` installs starlette, uvicorn and msgspec.
"""
