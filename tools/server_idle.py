"""Measure the memory of idle streams: `python -m tools.server_idle [--streams N]`.

A process holds N connections to a server, whose requests wait because one long request runs. The server sends comments
to them. The tool reports the private memory of the server without and with the streams. It runs only on Linux.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import genai
from genai.server.run import serve_on_thread
from genai.server.serving import Server, ServerOptions
from tools.adapter_soak import private_bytes
from tools.arguments import positive
from tools.server_models import make_model


def measure(streams: int) -> tuple[int, int]:
    """Return the private memory in bytes without and with idle streams."""
    with tempfile.TemporaryDirectory() as made:
        folder = make_model(Path(made) / "agents")
        with genai.LLM(folder, max_sequences=1, context_size=8192) as llm:
            server = Server(llm, ServerOptions(max_queue=streams + 1))
            server.admission.most_running = 1
            with serve_on_thread(server) as url:
                port = int(url.rpartition(":")[2])
                command = [sys.executable, "-I", str(Path(__file__).with_name("hold_streams.py")), str(port)]
                with _holding([*command, "2"]):
                    before = private_bytes()
                with _holding([*command, str(streams)]):
                    after = private_bytes()
                while server.admission.num_requests:
                    time.sleep(0.01)
            server.close()
    return before, after


class _holding:
    """A context with a process that holds streams."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the streams could not be opened")

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=positive, default=1000)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    before, after = measure(arguments.streams)
    each = (after - before) / arguments.streams
    print(f"{before / 2**20:.1f} MiB without, {after / 2**20:.1f} MiB with {arguments.streams:,} idle streams")
    print(f"{(after - before) / 2**20:.1f} MiB more, {each / 2**10:.1f} KiB per stream")


if __name__ == "__main__":
    main()
