"""`vllm-router`, the router of the vLLM project, in front of two servers."""

from __future__ import annotations

import sys
from pathlib import Path

from proxies import SERVERS, check, proxy, served


def command(port: int) -> list[str]:
    program = str(Path(sys.executable).with_name("vllm-router"))
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
    return [program, "--worker-urls", *SERVERS, "--policy", "round_robin", *where]


before = served()
with proxy(command) as url:
    check(url)
assert all(now > earlier for now, earlier in zip(served(), before, strict=True)), "a server got no request"
