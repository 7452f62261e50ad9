"""An asyncio app around an LLM: a standard-library HTTP server whose event loop never blocks on the model.

The handler has the form of a FastAPI handler: an async function that iterates over `llm.astream(...)`.

    async_server.py [--model FOLDER] [--port 8000]
    curl -N -d '{"prompt": "What is 12 + 7?"}' http://127.0.0.1:8000/chat

`async_server.py --self-test` starts the server on a free port, sends several simultaneous requests (one client
disconnects early), and exits. Without arguments, the script also runs this self-test.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import genai

MOST_BYTES = 2**20


async def chat(llm: genai.LLM, request: dict[str, Any]) -> AsyncIterator[str]:
    """Handle a request: yield pieces of the reply as they arrive. Requests from all clients share an engine's steps."""
    prompt = llm.render(request.pop("prompt"))
    async with llm.astream(prompt, max_tokens=request.pop("max_tokens", 200), **request) as stream:
        async for piece in stream:
            yield piece


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Return the path and body of an HTTP request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    if not 0 <= length <= MOST_BYTES:
        raise ValueError(f"content-length {length}, at most {MOST_BYTES} is accepted")
    return first.split(" ")[1], await reader.readexactly(length)


async def serve(llm: genai.LLM, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection: one request, one streamed reply. If the client disconnects, the generation is cancelled."""
    status, begun = 200, False

    async def send(text: str) -> None:
        nonlocal begun
        if not begun:
            begun = True
            writer.write(f"HTTP/1.1 {status} \r\nContent-Type: text/plain; charset=utf-8\r\n".encode())
            writer.write(b"Connection: close\r\n\r\n")
        writer.write(text.encode())
        await writer.drain()

    try:
        path, body = await asyncio.wait_for(read_request(reader), 10)
        if path != "/chat":
            raise LookupError(f"there is no {path}; POST to /chat")
        async with aclosing(chat(llm, json.loads(body))) as pieces:
            async for piece in pieces:
                await send(piece)
        await send("")
    except ConnectionError:
        pass  # the client disconnected
    except (genai.GenaiError, ValueError, LookupError, TypeError, AttributeError, EOFError, TimeoutError) as error:
        status = 404 if type(error) is LookupError else 400
        await send(f"{type(error).__name__}: {error}\n")
    finally:
        writer.close()


async def ask(port: int, request: Any, path: str = "/chat", stop_after: int | None = None) -> tuple[int, str]:
    """Send a request as a client; return status and text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(request).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    text = await reader.read(-1 if stop_after is None else stop_after)
    writer.close()
    return int(head.split()[1]), text.decode()


async def self_test(llm: genai.LLM, port: int) -> None:
    """Run several clients simultaneously, and a clock that shows that the event loop is not blocked."""
    ticks = 0

    async def clock() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    watch = asyncio.create_task(clock())
    story = {"prompt": "Tell me a story about Luna and Tom.", "temperature": 0.8, "seed": 1}
    sums, stories, hung_up, wrong, nowhere = await asyncio.gather(
        asyncio.gather(*(ask(port, {"prompt": f"What is {n} + 7?"}) for n in range(2, 8))),
        asyncio.gather(*(ask(port, story) for _ in range(3))),
        ask(port, {**story, "ignore_eos": True, "max_tokens": 900}, stop_after=5),
        ask(port, {**story, "top_p": 7}),
        ask(port, story, "/nowhere"),
    )
    watch.cancel()
    assert all(status == 200 for status, _ in [*sums, *stories]), (sums, stories)
    assert len(set(stories)) == 1, "the same seed gives the same story"
    assert wrong[0] == 400 and "top_p = 7" in wrong[1], wrong
    assert nowhere[0] == 404, nowhere
    assert hung_up[0] == 200 and ticks > 5, (hung_up, ticks)
    for number, (_, text) in enumerate(sums, 2):
        print(f"What is {number} + 7? {text}")
    print(stories[0][1])


async def main() -> None:
    """Load the model and start the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    with genai.LLM(arguments.model) as llm:
        testing = arguments.self_test or arguments.port is None
        port = 0 if testing else arguments.port
        async with await asyncio.start_server(lambda r, w: serve(llm, r, w), "127.0.0.1", port) as server:
            port = server.sockets[0].getsockname()[1]
            if testing:
                await self_test(llm, port)
            else:
                print(f"http://127.0.0.1:{port}/chat")
                await server.serve_forever()


asyncio.run(main())
