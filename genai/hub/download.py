"""Download of a repository's files, which appear when size and checksum are right; partial files are resumed."""

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

from ..errors import DownloadError
from .client import Client, Response, TransientError
from .listing import Listing, RemoteFile
from .shared_cache import blob_of
from .store import PulledFile

_PIECE = 1 << 20
_PART = ".part"
Progress = Callable[[int], None]


class _Checksum:
    """Checksums of the bytes so far: SHA-256, and the listing's checksum, which may be git's hash of the contents."""

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


def missing_bytes(files: tuple[RemoteFile, ...], folder: Path, repo: str = "") -> int:
    """Return the number of bytes that are still to be downloaded, from the sizes of the files that exist.

    Args:
        repo: the repository, whose files in Hugging Face's cache are not downloaded again.
    """

    def existing(file: RemoteFile) -> int:
        size = _size(folder / file.path) or _size(_part(folder, file))
        return size or (_size(blob_of(repo, file.digest)) if repo and file.digest else 0)

    return sum(file.size - min(existing(file), file.size) for file in files)


def fetch_file(client: Client, listing: Listing, file: RemoteFile, folder: Path, progress: Progress) -> PulledFile:
    """Download a file into a folder, unless it is already there or in Hugging Face's cache.

    Args:
        client: the client for the file's server.
        listing: the repository.
        file: the file.
        folder: the folder of the repository's files.
        progress: called with the number of bytes received; the number is negative if bytes must be downloaded again.

    Raises:
        DownloadError: if the file is incomplete, has other contents, or cannot be written.
        AccessError: if access to the file is denied.
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
        taken = None if part.exists() else _from_other_cache(listing, file, part)
        checksum = _download(client, file, part, progress) if taken is None else taken
        part.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, fix = "the disk is full", "free some space, and run the command again to resume the download"
        else:
            why, fix = str(error), "check the cache folder (GENAI_CACHE_DIR) and its permissions"
        raise DownloadError(f"{file.path}: the file cannot be written to {folder}", why, fix) from error
    return PulledFile(file.path, file.size, checksum)


def _download(client: Client, file: RemoteFile, part: Path, progress: Progress) -> str:
    """Return the SHA-256 of the complete file. After a wrong checksum, it is downloaded once more from the start."""
    for again in (True, False):
        checksum = client.patiently(lambda: _continue(client, file, part, progress), lambda: _size(part))
        if checksum.fits:
            return checksum.sha256
        part.unlink()
        if again:
            progress(-file.size)
    raise DownloadError(
        f"{file.path}: the checksum was wrong twice",
        f"{file.digest} was expected, but {checksum.sha256} was received (SHA-256), so the data was deleted",
        "try again later, or report the mismatch to the repository's owner",
    )


def _continue(client: Client, file: RemoteFile, part: Path, progress: Progress) -> _Checksum:
    """Download the rest of a partial file. Raises TransientError if the response ends early."""
    checksum = _Checksum(file)
    with part.open("a+b") as output:
        begin = _read_into(checksum, output, file.size)
        if begin == file.size:
            return checksum
        headers = {"range": f"bytes={begin}-"} if begin else {}
        if begin and file.version:
            headers["if-range"] = file.version  # changed contents are sent from the start
        with client.open(file.url, headers) as response:
            if begin and not _continues(response, begin):
                # The server cannot resume at this byte: it sends the file from the start, or nothing.
                output.truncate(0)
                progress(-begin)
                if response.status_code != 200:
                    raise TransientError(f"{response.status_code}: the server cannot resume at byte {begin:,}")
                checksum, begin = _Checksum(file), 0
            for piece in response.iter_bytes():
                begin += len(piece)
                if begin > file.size:
                    output.truncate(0)
                    raise DownloadError(
                        f"{file.path}: the server sent more than the announced {file.size:,} bytes",
                        "the file on the server differs from the file in the listing, so the data was deleted",
                        "try again later, or report the mismatch to the repository's owner",
                    )
                output.write(piece)
                checksum.update(piece)
                progress(len(piece))
    if begin < file.size:
        raise TransientError(f"the download of {file.path} ended after {begin:,} of {file.size:,} bytes")
    return checksum


def _continues(response: Response, begin: int) -> bool:
    match = re.match(r"bytes (\d{1,19})-", response.headers.get("content-range", ""))
    return response.status_code == 206 and match is not None and int(match[1]) == begin


def _read_into(checksum: _Checksum, output: IO[Any], size: int) -> int:
    """Feed a file's contents to a checksum and return their length. A file that is too long is emptied."""
    if output.seek(0, os.SEEK_END) > size:
        output.truncate(0)
    output.seek(0)
    length = 0
    while data := output.read(_PIECE):
        checksum.update(data)
        length += len(data)
    return length


def _checksum_of(path: Path, file: RemoteFile) -> str | None:
    """Return the SHA-256 of a complete file, or None if it is not the listed file."""
    if _size(path) != file.size:
        return None
    checksum = _Checksum(file)
    with path.open("rb") as source:
        _read_into(checksum, source, file.size)
    return checksum.sha256 if checksum.fits else None


def _from_other_cache(listing: Listing, file: RemoteFile, part: Path) -> str | None:
    """Link or copy a file from Hugging Face's cache, where checksums are file names, and return its SHA-256."""
    if not (listing.reference.repo and file.digest):
        return None
    with suppress(OSError):
        blob = blob_of(listing.reference.repo, file.digest).resolve(strict=True)
        if (checksum := _checksum_of(blob, file)) is not None:
            try:
                os.link(blob, part)
            except OSError:
                shutil.copyfile(blob, part)
            return checksum
    part.unlink(missing_ok=True)
    return None


def remove_strangers(files: tuple[RemoteFile, ...], folder: Path) -> None:
    """Remove the files that an earlier pull with another choice left in a folder."""
    expected = {folder / file.path for file in files} | {_part(folder, file) for file in files}
    for path in list(_files_below(folder)):
        if path not in expected:
            path.unlink(missing_ok=True)


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _part(folder: Path, file: RemoteFile) -> Path:
    """Return the path of a partial file. The file's name depends on the expected contents."""
    contents = file.digest or f"{file.url}\0{file.version}"
    key = hashlib.sha256(f"{contents}\0{file.size}".encode()).hexdigest()[:12]
    return folder / f"{file.path}.{key}{_PART}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
