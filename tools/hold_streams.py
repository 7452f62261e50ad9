"""Hold streams of a server open: `python -I hold_streams.py PORT COUNT`. It is the client of server_idle.py.

It imports only the standard library, prints a line when all streams have received something, and ends when the standard
input ends.
"""

from __future__ import annotations

import json
import resource
import socket
import sys


def main(port: int, count: int) -> None:
    """Open the streams and hold them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    opened = []
    for _ in range(count):
        opened.append(socket.create_connection(("127.0.0.1", port)))
        opened[-1].sendall(head.encode() + content)
    for one in opened:
        one.recv(100)  # the headers, which precede the first comment
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
