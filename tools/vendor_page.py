"""Write the libraries of the chat page of `genai serve` to genai/server/page/vendor, from npm packages.

Usage: python -m tools.vendor_page

The tool needs `npm` and a network. It compares each package with the hash below, so a package that was changed after
its release is refused. To update a library, set its version and the hash that `npm view NAME@VERSION dist.integrity`
prints. Browsers load the files as they are. Two changes are made: an import of "preact" becomes the path of the file,
because browsers find no packages by name, and references to source maps are removed, because the maps are not shipped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "genai" / "server" / "page" / "vendor"


@dataclass(frozen=True)
class Package:
    """An npm package.

    Attributes:
        name, version: the package.
        integrity: SHA-512 of the package, as npm prints it.
        files: the files to ship, by their paths in the package.
    """

    name: str
    version: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "preact-hooks.js", "LICENSE": "preact.LICENSE"},
    ),
    Package(
        "htm",
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"dist/htm.mjs": "htm.js", "LICENSE": "htm.LICENSE"},
    ),
    Package(
        "streaming-markdown",
        "0.2.15",
        "sha512-eSWjdvLSTznl2+FIzuxw1TRXwhjZiY1RfSygGCMpcNY8CrsaUM2zHtxe/JFcPoXCQxeO3TSJ72QMDIN5B/Ui1w==",
        {"smd.min.js": "streaming-markdown.js", "license": "streaming-markdown.LICENSE"},
    ),
    Package(
        "dompurify",
        "3.5.0",
        "sha512-LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
        {"dist/purify.es.mjs": "dompurify.js", "LICENSE": "dompurify.LICENSE"},
    ),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"es/highlight.min.js": "highlight.js", "LICENSE": "highlight.LICENSE"},
    ),
)


def shipped_text(data: bytes) -> str:
    """Return a file of a package with the two changes that the module's docstring lists."""
    text = data.decode().replace('from"preact"', 'from"./preact.js"')
    return re.sub(r"\n?//# sourceMappingURL=\S+\s*$", "", text).rstrip() + "\n"


def fetch(package: Package, folder: Path) -> dict[str, str]:
    """Return the texts of a package's files by the names under which they are shipped.

    Raises:
        SystemExit: the hash of the package differs.
    """
    command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    name = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    data = (folder / name).read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.integrity:
        sys.exit(f"{package.name} {package.version} has the hash {found}, and {package.integrity} is expected")
    with tarfile.open(folder / name) as archive:
        members = {path: archive.extractfile(f"package/{path}") for path in package.files}
        return {package.files[path]: shipped_text(file.read()) for path, file in members.items() if file is not None}


def main() -> None:
    """Write the files, and their hashes to packages.json."""
    FOLDER.mkdir(exist_ok=True)
    facts = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            texts = fetch(package, Path(folder))
            hashes = {}
            for name, text in texts.items():
                (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
                hashes[name] = hashlib.sha256(text.encode()).hexdigest()
            facts[package.name] = {"version": package.version, "integrity": package.integrity, "files": hashes}
    (FOLDER / "packages.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
