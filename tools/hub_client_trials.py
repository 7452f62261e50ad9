"""Print how huggingface_hub's own download and this toolkit's download react to the same faults of a hub.

    python tools/hub_client_trials.py

The results are the basis of docs/explanation/downloads.md. Each trial runs in a separate process with a local hub.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.local_hub import Fault, LocalHub

WEIGHTS = bytes(range(256)) * 12_000
_CHECK = "data = path.read_bytes(); print('right bytes' if data == bytes(range(256)) * 12_000 else 'WRONG BYTES')"
CLIENTS = {
    "huggingface_hub": "import pathlib, huggingface_hub; "
    "path = pathlib.Path(huggingface_hub.hf_hub_download('org/name', 'a-Q4_0.gguf')); " + _CHECK,
    "this toolkit": "import genai; path = genai.pull('org/name', quiet=True); " + _CHECK,
}
# For each trial, the part of the URL paths whose next requests fail, and the faults.
TRIALS: dict[str, tuple[str, list[Fault]]] = {
    "no fault": ("/cdn/", []),
    "other bytes of the same length": ("/cdn/", [Fault(body=b"x" * len(WEIGHTS))] * 2),
    "more bytes than announced": ("/cdn/", [Fault(body=WEIGHTS + b"y" * 5_000_000)] * 6),
    "connection cut twice": ("/cdn/", [Fault(cut=1_000_000)] * 2),
    "status 503, twice": ("/cdn/", [Fault(status=503)] * 2),
    "redirections without end": (
        "/resolve/",
        [Fault(status=302, headers={"location": "/org/name/resolve/main/a"})] * 99,
    ),
    "status 429, retry in an hour": ("/cdn/", [Fault(status=429, headers={"retry-after": "3600"})] * 9),
}
_SECONDS = 60


def outcome(client: str, part: str, faults: list[Fault]) -> str:
    """Return the last line that a client prints; the last line of its error if it fails."""
    hub = LocalHub()
    hub.add("org/name", {"a-Q4_0.gguf": WEIGHTS})
    hub.faults[part] = list(faults)
    with hub, tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": f"{folder}/hf",
            "GENAI_CACHE_DIR": f"{folder}/genai",
        }
        command = [sys.executable, "-c", CLIENTS[client]]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"no result and no message after {_SECONDS} seconds"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    raised = [line for line in lines if re.match(r"[A-Za-z]\w*(\.\w+)+: |[A-Z]\w+Error: ", line)]
    return lines[-1] if done.returncode == 0 or not raised else raised[-1]


if __name__ == "__main__":
    for trial, (part, faults) in TRIALS.items():
        for client in CLIENTS:
            print(f"{trial} | {client} | {outcome(client, part, faults)[:150]}", flush=True)
