"""What a hub says that a repository holds, checked before anything of it is believed."""

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

_MOST_FILES = 200_000
_MOST_BYTES = 1 << 50
_LONGEST_NAME = 220  # bytes: of the 255 that systems take, some are for the ending while it comes
_LICENSE_TAG = "license:"


@dataclass(frozen=True)
class RemoteFile:
    """One file that can be fetched.

    Attributes:
        path: where it lies in its repository.
        size: in bytes.
        digest: "sha256:" or "git:" (SHA-1, as git names a file's contents) and hexadecimal digits; "" = not known.
        url: its address.
        version: what the server calls these contents (an ETag, or a date); "" = nothing.
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
        reference: what was asked for.
        page: its address, for people.
        commit: which commit its branch or tag is at; "" for a file elsewhere.
        license: as its model card names it; "" = it names none.
        gated: its authors want an agreement first.
        files: in order of their paths.
        left_out: paths that cannot be written on every system, and are not fetched.
    """

    reference: Reference
    page: str
    commit: str
    license: str
    gated: bool
    files: tuple[RemoteFile, ...]
    left_out: tuple[str, ...] = ()


def read_listing(reference: Reference, notice: Notice) -> Listing:
    """Ask the hub what a repository holds, or a server how large a file is.

    Raises:
        AccessError, DownloadError: there is no such thing, it may not be seen, or the answer cannot be believed.
    """
    if reference.url:
        return _of_file(reference, notice)
    page = page_of(reference.repo)
    revision = f"/revision/{quote(reference.revision, safe='')}" if reference.revision else ""
    url = f"{endpoint()}/api/models/{reference.repo}{revision}?blobs=true"
    text = Client(page, notice).read(url).decode("utf-8", "replace")
    return listing_of(reference, json_object(text, url, DownloadError, most_values=20 * _MOST_FILES))


def listing_of(reference: Reference, facts: Mapping[str, Any]) -> Listing:
    """The listing that a hub's answer means. Raises DownloadError: it cannot be believed."""
    commit, siblings = facts.get("sha"), facts.get("siblings")
    if not (isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit) and isinstance(siblings, list)):
        raise _unbelievable(reference, "it has no commit, or no list of files")
    if len(siblings) > _MOST_FILES:
        raise _unbelievable(reference, f"it lists {len(siblings):,} files; at most {_MOST_FILES:,} are read")
    paths = [_path(reference, entry) for entry in siblings]
    if len(set(paths)) < len(paths):
        raise _unbelievable(reference, "it lists a file twice")
    named = sorted((path, entry) for path, entry in zip(paths, siblings, strict=True))
    files = [_file(reference, commit, path, entry) for path, entry in named if is_safe(path)]
    gated = facts.get("gated") not in (None, False, "False", "false")
    left_out = tuple(path for path in paths if not is_safe(path))
    return Listing(reference, page_of(reference.repo), commit, _license(facts), gated, tuple(files), left_out)


def _path(reference: Reference, entry: Any) -> str:
    path = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(path, str) or _leads_elsewhere(path):
        raise _unbelievable(reference, f"it lists a file named {path!r:.120}, which could be written elsewhere")
    return path


def _file(reference: Reference, commit: str, path: str, entry: dict[str, Any]) -> RemoteFile:
    value = entry.get("lfs")
    lfs: dict[str, Any] = value if isinstance(value, dict) else {}
    size = lfs.get("size", entry.get("size"))
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MOST_BYTES:
        raise _unbelievable(reference, f"{path:.200} is said to have {size!r:.40} bytes")
    digest = _digest("sha256", lfs.get("sha256"), 64) or _digest("git", entry.get("blobId"), 40)
    url = f"{endpoint()}/{reference.repo}/resolve/{commit}/{quote(path)}"
    return RemoteFile(path, size, digest, url)


def is_safe(path: str) -> bool:
    """Whether a path stays inside whatever folder it is put into, on every system."""
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
        raise DownloadError(f"{url:.200}: not fetched", f"{path!r:.80} is no name for a file here", "fetch it by hand")
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
            f"{url:.200}: not fetched", "the server does not say how large it is", "fetch it with another tool"
        )
    digest = f"sha256:{reference.digest}" if reference.digest else ""
    return Listing(reference, url, "", "", False, (RemoteFile(path, size, digest, url, version),))


def _unbelievable(reference: Reference, why: str) -> DownloadError:
    return DownloadError(
        f"{reference.name}: the hub's answer about it is not believed",
        why,
        "check HF_ENDPOINT, and that the repository is what you take it for",
    )
