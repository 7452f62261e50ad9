"""The file list of a repository on a hub, validated before it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..common.reading import json_object
from ..errors import DownloadError
from .client import Client, Notice, page_of
from .references import Reference, endpoint

MOST_FILES = 200_000
_MOST_BYTES = 1 << 50
_LONGEST_NAME = 220  # bytes; file systems allow 255, and the suffix of a partial file needs some of these
_LICENSE_TAG = "license:"


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded.

    Attributes:
        path: path in its repository.
        size: size in bytes.
        digest: "sha256:" or "git:" (SHA-1, as git names a file's contents) and hexadecimal digits; "" = unknown.
        url: URL of the file.
        version: the server's name for these contents (an ETag, or a date); "" = none.
    """

    path: str
    size: int
    digest: str
    url: str
    version: str = ""


@dataclass(frozen=True)
class Listing:
    """A repository at one commit.

    Attributes:
        reference: the reference to the repository or file.
        page: URL of the repository's web page.
        commit: commit of the branch or tag; "" for a file outside a hub.
        license: licence that the model card names; "" = none.
        gated: True if the authors require an agreement first.
        files: the files, sorted by path.
        left_out: paths that cannot be written on every system and are therefore not downloaded.
    """

    reference: Reference
    page: str
    commit: str
    license: str
    gated: bool
    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...] = ()


def read_listing(reference: Reference, notice: Notice) -> Listing:
    """Read the file list of a repository from the hub, or the size of a file from its server.

    Raises:
        AccessError, DownloadError: if the repository or file does not exist, access is denied, or the response is
            invalid.
    """
    if reference.url:
        return _of_file(reference, notice)
    page = page_of(reference.repo)
    revision = f"/revision/{quote(reference.revision, safe='')}" if reference.revision else ""
    url = f"{endpoint()}/api/models/{reference.repo}{revision}?blobs=true"
    text = Client(page, notice).read(url).decode("utf-8", "replace")
    return listing_of(reference, json_object(text, url, DownloadError, most_values=20 * MOST_FILES))


def listing_of(reference: Reference, facts: Mapping[str, Any]) -> Listing:
    """Return the listing in a hub's response. Raises DownloadError if the response is invalid."""
    commit, siblings = facts.get("sha"), facts.get("siblings")
    if not (isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit) and isinstance(siblings, list)):
        raise _unbelievable(reference, "the response has no commit, or no list of files")
    if len(siblings) > MOST_FILES:
        raise _unbelievable(
            reference, f"the response lists {len(siblings):,} files; at most {MOST_FILES:,} are accepted"
        )
    paths = [_path(reference, entry) for entry in siblings]
    if len(set(paths)) < len(paths):
        raise _unbelievable(reference, "the response lists a file twice")
    named = sorted((path, entry) for path, entry in zip(paths, siblings, strict=True))
    files = [_file(reference, commit, path, entry) for path, entry in named if is_safe(path)]
    gated = facts.get("gated") not in (None, False, "False", "false")
    left_out = tuple(path for path in paths if not is_safe(path))
    return Listing(reference, page_of(reference.repo), commit, _license(facts), gated, tuple(files), left_out)


def _path(reference: Reference, entry: Any) -> str:
    path = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(path, str) or _leads_elsewhere(path):
        raise _unbelievable(reference, f"the response lists a file named {path!r:.120}, which could leave the folder")
    return path


def _file(reference: Reference, commit: str, path: str, entry: dict[str, Any]) -> RemoteFile:
    value = entry.get("lfs")
    lfs: dict[str, Any] = value if isinstance(value, dict) else {}
    size = lfs.get("size", entry.get("size"))
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
        raise _unbelievable(reference, f"{path:.200} has an invalid size: {size!r:.40}")
    digest = _digest("sha256", lfs.get("sha256"), 64) or _digest("git", entry.get("blobId"), 40)
    url = f"{endpoint()}/{reference.repo}/resolve/{commit}/{quote(path)}"
    return RemoteFile(path, size, digest, url)


def is_safe(path: str) -> bool:
    """Return True if, on every system, a path stays inside the folder to which it is relative."""
    odd = any(character in path for character in ':*?"<>|') or not path.isprintable() or len(path) > 1000
    longest = max(len(part.encode("utf-8", "surrogatepass")) for part in path.split("/"))
    return not odd and longest <= _LONGEST_NAME and not _leads_elsewhere(path)


def _leads_elsewhere(path: str) -> bool:
    return "\\" in path or re.match("[A-Za-z]:", path) is not None or not {"", ".", ".."}.isdisjoint(path.split("/"))


def _digest(kind: str, value: Any, digits: int) -> str:
    matches = isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value)
    return f"{kind}:{value}" if matches else ""


def _license(facts: Mapping[str, Any]) -> str:
    card, tags = facts.get("cardData"), facts.get("tags")
    card, tags = card if isinstance(card, dict) else {}, tags if isinstance(tags, list) else []
    name, license_name = card.get("license"), card.get("license_name")
    tagged = [tag.removeprefix(_LICENSE_TAG) for tag in tags if isinstance(tag, str) and tag.startswith(_LICENSE_TAG)]
    names = [name, license_name] if name != "other" or not isinstance(license_name, str) else [license_name]
    license_id = next((text for text in (*names, *tagged) if isinstance(text, str) and text), "")
    return "".join(character for character in license_id if character.isprintable())[:80]


def _of_file(reference: Reference, notice: Notice) -> Listing:
    url = reference.url
    path = url.split("?", 1)[0].rsplit("/", 1)[-1]
    if not is_safe(path):
        raise DownloadError(
            f"{url:.200}: the file was not downloaded",
            f"{path!r:.80} is not a valid file name",
            "download it with another tool, and pass its path",
        )
    client = Client(notice=notice)

    def described() -> tuple[int, str]:
        with client.open(url) as response:
            etag = response.headers.get("etag", "")
            version = response.headers.get("last-modified", "") if etag.startswith("W/") or not etag else etag
            try:
                return int(response.headers.get("content-length", "")), version
            except ValueError:
                return -1, version

    size, version = client.patiently(described)
    if not 0 < size <= _MOST_BYTES:
        raise DownloadError(
            f"{url:.200}: the file was not downloaded",
            "the server does not report a valid size",
            "download it with another tool, and pass its path",
        )
    digest = f"sha256:{reference.digest}" if reference.digest else ""
    return Listing(reference, url, "", "", False, (RemoteFile(path, size, digest, url, version),))


def _unbelievable(reference: Reference, why: str) -> DownloadError:
    return DownloadError(
        f"{reference.name}: the hub's response about this repository is invalid",
        why,
        "check HF_ENDPOINT and the name of the repository",
    )
