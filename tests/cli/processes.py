"""Commands that run in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "genai", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
