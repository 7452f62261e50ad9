"""Files of a repository to a folder: each appears when its size and checksum are right; what came before is kept."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..common.foreign_models import huggingface_cache
from ..errors import DownloadError
from .client import Client, Response, TransientError
from .listing import Listing, RemoteFile
from .store import PulledFile

_PIECE = 1 << 20
_PART = ".part"
Progress = Callable[[int], None]


class _Checksum:
    """Of the bytes so far: SHA-256, and what the listing has, which may be git's name of the contents."""

    def __init__(self, file: RemoteFile) -> None:
        self._expected = file.digest
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._expected.startswith("git:"):
            self._git.update(data)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def fits(self) -> bool:
        return self._expected in ("", f"sha256:{self.sha256}", f"git:{self._git.hexdigest()}")


def missing_bytes(files: tuple[RemoteFile, ...], folder: Path) -> int:
    """How much has yet to come, by the sizes of what is there."""
    return sum(file.size - min(_size(folder / file.path) or _size(_part(folder, file)), file.size) for file in files)


def fetch_file(client: Client, listing: Listing, file: RemoteFile, folder: Path, progress: Progress) -> PulledFile:
    """Bring one file into a folder, or take it from there, or from Hugging Face's own cache.

    Args:
        folder: of the repository's files.
        progress: told the bytes that came; less than 0 where they have to come again.

    Raises:
        DownloadError: it does not come whole, is another one, or there is no room. AccessError: it may not be had.
    """
    path = folder / file.path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            if (existing := _checksum_of(path, file)) is not None:
                return PulledFile(file.path, file.size, existing)
            path.unlink()
            progress(-file.size)
        part = _part(folder, file)
        if not part.exists() and (checksum := _from_other_cache(listing, file, part)) is not None:
            progress(file.size)
        else:
            checksum = _download(client, file, part, progress)
        part.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, fix = "the disk is full", "free some space and run the command again: what has come is kept"
        else:
            why, fix = str(error), "check the cache's folder (GENAI_CACHE_DIR) and its permissions"
        raise DownloadError(f"{file.path}: cannot be written to {folder}", why, fix) from error
    return PulledFile(file.path, file.size, checksum)


def _download(client: Client, file: RemoteFile, part: Path, progress: Progress) -> str:
    """The file's SHA-256, when it is whole; a wrong checksum is given one more chance, from the beginning."""
    for again in (True, False):
        checksum = client.patiently(lambda: _continue(client, file, part, progress), lambda: _size(part))
        if checksum.fits:
            return checksum.sha256
        part.unlink()
        if again:
            progress(-file.size)
    raise DownloadError(
        f"{file.path}: the wrong checksum, twice",
        f"{file.digest} is expected; {checksum.sha256} came (SHA-256)",
        "nothing of it is kept; try again later, or tell the repository's owner",
    )


def _continue(client: Client, file: RemoteFile, part: Path, progress: Progress) -> _Checksum:
    """Fetch what is missing behind the bytes that are there. Raises Broken: it ended too early."""
    checksum = _Checksum(file)
    with part.open("a+b") as output:
        begin = _read_into(checksum, output, file.size)
        if begin == file.size:
            return checksum
        headers = {"range": f"bytes={begin}-"} if begin else {}
        if begin and file.version:
            headers["if-range"] = file.version  # other contents come from their beginning
        with client.open(file.url, headers) as response:
            if begin and not _continues(response, begin):
                # It cannot go on from there, and sends the file from its beginning, or not at all.
                output.truncate(0)
                progress(-begin)
                if response.status_code != 200:
                    raise TransientError(f"{response.status_code}: it cannot go on at byte {begin:,}")
                checksum, begin = _Checksum(file), 0
            for piece in response.iter_bytes():
                begin += len(piece)
                if begin > file.size:
                    output.truncate(0)
                    raise DownloadError(
                        f"{file.path}: more than the {file.size:,} bytes come that were announced",
                        "the server sends another file",
                        "nothing of it is kept; try again later, or tell the repository's owner",
                    )
                output.write(piece)
                checksum.update(piece)
                progress(len(piece))
    if begin < file.size:
        raise TransientError(f"{file.path} ended after {begin:,} of {file.size:,} bytes")
    return checksum


def _continues(response: Response, begin: int) -> bool:
    match = re.match(r"bytes (\d{1,19})-", response.headers.get("content-range", ""))
    return response.status_code == 206 and match is not None and int(match[1]) == begin


def _read_into(checksum: _Checksum, output: IO[Any], size: int) -> int:
    """Feed what a file has to a checksum; one that is too long is emptied. Returns its length."""
    if output.seek(0, os.SEEK_END) > size:
        output.truncate(0)
    output.seek(0)
    length = 0
    while data := output.read(_PIECE):
        checksum.update(data)
        length += len(data)
    return length


def _checksum_of(path: Path, file: RemoteFile) -> str | None:
    """A whole file's SHA-256, if it is the one that is listed."""
    if _size(path) != file.size:
        return None
    checksum = _Checksum(file)
    with path.open("rb") as source:
        _read_into(checksum, source, file.size)
    return checksum.sha256 if checksum.fits else None


def _from_other_cache(listing: Listing, file: RemoteFile, part: Path) -> str | None:
    """Link or copy a file out of Hugging Face's cache, where files are called by their checksums; its SHA-256."""
    if not (listing.reference.repo and file.digest):
        return None
    blob = (
        huggingface_cache() / f"models--{listing.reference.repo.replace('/', '--')}/blobs/{file.digest.split(':')[1]}"
    )
    with suppress(OSError):
        blob = blob.resolve(strict=True)
        if (checksum := _checksum_of(blob, file)) is not None:
            try:
                os.link(blob, part)
            except OSError:
                shutil.copyfile(blob, part)
            return checksum
    part.unlink(missing_ok=True)
    return None


def remove_strangers(files: tuple[RemoteFile, ...], folder: Path) -> None:
    """Remove what an earlier pull of other files left in a folder."""
    expected = {folder / file.path for file in files} | {_part(folder, file) for file in files}
    for path in list(_files_below(folder)):
        if path not in expected:
            path.unlink(missing_ok=True)


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _part(folder: Path, file: RemoteFile) -> Path:
    """Where a file gathers; its name changes with the contents that it is to have."""
    contents = file.digest or f"{file.url}\0{file.version}"
    key = hashlib.sha256(f"{contents}\0{file.size}".encode()).hexdigest()[:12]
    return folder / f"{file.path}.{key}{_PART}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
