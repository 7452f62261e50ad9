"""The chat page's files: types, caching, the security policy, and the libraries that are shipped with it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from genai.server import page
from genai.server.keys import Key
from tools import vendor_page

from .conftest import Running

VENDOR = page.FOLDER / "vendor"


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with running.http as made:
        yield made


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/components/app.js", "text/javascript; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/page/vendor/preact.LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_files_and_their_types(client: httpx.Client, path: str, kind: str) -> None:
    found = client.get(path)
    assert found.status_code == 200
    assert found.headers["content-type"] == kind
    assert found.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'; script-src 'self'" in found.headers["content-security-policy"]
    again = client.get(path, headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get(path, headers={"if-none-match": '"other"'}).content == found.content


@pytest.mark.parametrize("name", ["missing.js", "../page.py", "..%2Fpage.py", "vendor", ""])
def test_other_files_are_not_served(client: httpx.Client, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


def test_without_the_page(serving: Callable[..., Running]) -> None:
    with serving(page=False).http as client:
        assert client.get("/").status_code == client.get("/page/main.js").status_code == 404
        assert client.get("/health").status_code == 200


def test_the_page_needs_no_key(serving: Callable[..., Running]) -> None:
    with serving(keys=[Key("a", "a", b"0")]).http as client:
        assert client.get("/").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_the_page_loads_only_files_that_exist() -> None:
    """Browsers find imports by their paths, and nothing checks them before."""
    for path in page.FOLDER.rglob("*.js"):
        if path.parent != VENDOR:
            for name in re.findall(r'^(?:import|export) .*?from "([^"]+)";', path.read_text("utf-8"), re.MULTILINE):
                assert (path.parent / name).is_file(), f"{path.name} imports {name}"
    for name in re.findall(r'(?:src|href)="([^"]+)"', (page.FOLDER / "index.html").read_text("utf-8")):
        assert (page.FOLDER.parent / name).is_file()


def test_the_libraries_are_those_of_the_tool() -> None:
    facts = json.loads((VENDOR / "packages.json").read_text("utf-8"))
    assert {name: (one["version"], one["integrity"]) for name, one in facts.items()} == {
        one.name: (one.version, one.integrity) for one in vendor_page.PACKAGES
    }
    hashes = {name: digest for one in facts.values() for name, digest in one["files"].items()}
    assert {path.name for path in VENDOR.iterdir()} == {*hashes, "packages.json"}
    for name, digest in hashes.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    for package in vendor_page.PACKAGES:
        assert any(name.endswith("LICENSE") for name in package.files.values())


def test_the_changes_of_the_tool() -> None:
    text = b'import{options}from"preact";x\n//# sourceMappingURL=hooks.mjs.map\n'
    assert vendor_page.shipped_text(text) == 'import{options}from"./preact.js";x\n'
