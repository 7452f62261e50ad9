"""A process that sends concurrent requests to a server and measures the times of the replies' chunks.

It is started as a script, imports only the standard library, and reads one JSON job per line, so that the client takes
as little processor time from the server as possible:

    {"url": "http://127.0.0.1:8000/v1", "model": "pebble", "prompts": [[5, 7], [9, 4]], "tokens": 64}

All prompts of a job are sent at once, each on its own connection, as streams of /completions with token ids. The result
is one line of JSON: `seconds` until the end of the last stream, the seconds `first` until the first text of each
stream, the seconds `between` two chunks with text, the number of `tokens`, and the client's processor time `cpu`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_MAX_LINE = 1 << 20


class _Failed(Exception):
    """The server refused a request, or a stream ended early."""


async def _stream(
    host: str, port: int, path: str, body: Mapping[str, Any], times: list[float], *, tls: bool
) -> int | None:
    """Send one request, append the time of each chunk with text, and return the number of tokens if it is sent."""
    reader, writer = await asyncio.open_connection(host, port, ssl=tls or None, limit=_MAX_LINE)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            said = (await reader.read(2000)).partition(b"\r\n\r\n")[2]
            raise _Failed(f"{status.decode('latin-1').strip()} {said.decode('utf-8', 'replace')}"[:500])
        tokens = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if b'"text":""' not in line and b'"choices":[]' not in line:
                    times.append(time.perf_counter())
                elif b'"completion_tokens":' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            elif line.startswith(b"data: [DONE]"):
                return tokens
        raise _Failed("the stream ended early")
    finally:
        writer.close()


async def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Send the requests of a job, and return their times."""
    parts, count = urlsplit(job["url"]), len(job["prompts"])
    tls = parts.scheme == "https"
    place = (parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80), f"{parts.path}/completions")
    body = {"model": job["model"], "max_tokens": job["tokens"], "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    times: list[list[float]] = [[] for _ in range(count)]
    used, began = _cpu_seconds(), time.perf_counter()
    sent = [
        _stream(*place, {**body, "prompt": prompt}, one, tls=tls)
        for prompt, one in zip(job["prompts"], times, strict=True)
    ]
    tokens = await asyncio.gather(*sent)
    return {
        "seconds": time.perf_counter() - began,
        "first": [one[0] - began for one in times if one],
        "between": [after - before for one in times for before, after in itertools.pairwise(one)],
        "tokens": sum(job["tokens"] if one is None else one for one in tokens),
        "cpu": _cpu_seconds() - used,
    }


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run the jobs of the standard input."""
    for line in sys.stdin:
        try:
            result = asyncio.run(run_job(json.loads(line)))
        except (OSError, _Failed, ValueError) as error:
            result = {"error": f"{type(error).__name__.strip('_')}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
