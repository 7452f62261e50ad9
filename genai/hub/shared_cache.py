"""Models in the cache of Hugging Face's library, which other tools downloaded. This package only reads that cache.

models--org--name/refs/main            the commit of a branch
models--org--name/snapshots/COMMIT/…   links to blobs, at the paths of the repository
models--org--name/blobs/CHECKSUM       the contents: SHA-256 of large files, git's SHA-1 of others
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..common.foreign_models import huggingface_cache
from .client import page_of
from .listing import MOST_FILES, Listing, RemoteFile, is_safe
from .references import Reference

_KINDS = {64: "sha256", 40: "git"}  # kinds of checksums, by their number of digits


def repository_folder(repo: str) -> Path:
    """Return the folder of a repository in the cache of Hugging Face's library."""
    return huggingface_cache() / f"models--{repo.replace('/', '--')}"


def blob_of(repo: str, digest: str) -> Path:
    """Return the path at which the library stores a file with this checksum, such as "sha256:…"."""
    return repository_folder(repo) / "blobs" / digest.partition(":")[2]


def snapshot_of(reference: Reference) -> Path | None:
    """Return the snapshot of a reference's revision in the cache of Hugging Face's library; None if there is none."""
    revision = reference.revision or "main"
    if not reference.repo or not is_safe(revision):
        return None
    folder = repository_folder(reference.repo)
    commit = revision
    with suppress(OSError), (folder / "refs" / revision).open("rb") as file:
        commit = file.read(64).decode("ascii", "replace").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch("[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def cached_listing(reference: Reference) -> Listing | None:
    """Return the listing of a snapshot in the cache of Hugging Face's library; None if there is none.

    The listing contains only the files that were downloaded and whose checksums are known.
    """
    snapshot = snapshot_of(reference)
    if snapshot is None:
        return None
    files = sorted(_files(snapshot), key=lambda file: file.path)
    return Listing(reference, page_of(reference.repo), snapshot.name, "", False, tuple(files)) if files else None


def _files(snapshot: Path) -> Iterator[RemoteFile]:
    blobs = snapshot.parent.parent.resolve() / "blobs"
    for path in itertools.islice(snapshot.rglob("*"), MOST_FILES):
        name = path.relative_to(snapshot).as_posix()
        with suppress(OSError, RuntimeError):  # RuntimeError: a loop of links
            blob = path.resolve(strict=True)
            kind = _KINDS.get(len(blob.name))
            if (
                kind
                and blob.parent == blobs
                and blob.is_file()
                and re.fullmatch("[0-9a-f]+", blob.name)
                and is_safe(name)
            ):
                yield RemoteFile(name, blob.stat().st_size, f"{kind}:{blob.name}", path.as_uri())
