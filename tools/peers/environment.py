"""A virtual environment with the packages of one peer, and a record of its contents."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .processes import PeerError, run_logged

_RECORD = "installed.json"


class VirtualEnvironment:
    """The virtual environment in `folder`/venv, whose installation log is `folder`/setup.log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "setup.log"

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return self.program("python")

    def program(self, name: str) -> str:
        """Return the path of a program installed in the environment."""
        return str(self.folder / "venv" / "bin" / name)

    def install(self, packages: Sequence[str]) -> None:
        """Install the newest packages that pip finds; do nothing if an earlier call installed the same list.

        Raises:
            PeerError: pip failed.
        """
        if self._record().get("asked") == list(packages):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        run_logged([sys.executable, "-m", "venv", str(self.folder / "venv")], self.log)
        self.pip("install", *packages)
        listing = subprocess.run(
            [self.python, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True, check=False
        )
        if listing.returncode:
            raise PeerError(f"pip list failed: {listing.stderr.strip()[-200:]}")
        found = {package["name"]: package["version"] for package in json.loads(listing.stdout)}
        names = [package.partition("==")[0] for package in packages]
        record = {"asked": list(packages), "versions": {name: found[name] for name in names if name in found}}
        (self.folder / _RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")

    def pip(self, *arguments: str) -> None:
        """Run the environment's pip.

        Raises:
            PeerError: pip failed.
        """
        run_logged([self.python, "-m", "pip", *arguments], self.log)

    def versions(self) -> dict[str, str]:
        """Return the versions of the requested packages; empty if there is no environment."""
        found: dict[str, str] = self._record().get("versions", {})
        return found

    def _record(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record
