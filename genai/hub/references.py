"""The grammar of model names: a repository on a hub, a short name from the table, or a file on the web.

docs/reference/model-names.md describes the grammar. `local` separates names from paths, and `known` reads the table.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import DownloadError, ModelFolderError
from .known import known_model

HUB = "https://huggingface.co"
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SEGMENT = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
# Names of GGUF files may contain any character that file names may contain.
_PART = r"[\w./+-]+|[^\s:/][^:\\]*\.(?i:gguf)"
_NAME = re.compile(rf"(?P<repo>{_SEGMENT}(?:/{_SEGMENT})?)(?:@(?P<revision>[\w./-]+?))?(?::(?P<part>{_PART}))?")
_INSIDE = re.compile(
    r"(?P<repo>[^/]+/[^/]+|[^/]+$)(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<part>.+?))?)?/?"
)
# Names that end like this are paths of files, unless hf: precedes them.
_A_FILE = re.compile(r"\.(gguf|onnx|safetensors|bin|json|pt|pth)$", re.IGNORECASE)
_SAFE_REVISION = re.compile(r"(?!.*(?:\.\.|//))[\w.-][\w./-]{0,199}")
_MAIN = "main"


@dataclass(frozen=True)
class Reference:
    """A model that is not at a local path.

    Attributes:
        repo: "org/name" on the hub; "" for a file outside the hub.
        revision: a branch, tag or commit; "" = the default branch.
        part: the part of the repository: a GGUF file or its quantisation (Q4_K_M), or an ONNX folder; "" = a rule
            decides.
        url: URL of a file outside the hub; "" for a repository.
        digest: SHA-256 of that file in hexadecimal digits, from "#sha256="; "" = unknown.
        explicit: True if the text cannot be a path, because it starts with hf:, https: or a hub's host name.
    """

    repo: str = ""
    revision: str = ""
    part: str = ""
    url: str = ""
    digest: str = ""
    explicit: bool = False

    @property
    def name(self) -> str:
        """The name in the cache: org/name[@revision][:part], or the URL."""
        if self.url:
            return self.url
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.part}" if self.part else "")


def endpoint() -> str:
    """Return the hub's address: $HF_ENDPOINT, or huggingface.co. Raises DownloadError for an invalid $HF_ENDPOINT."""
    address = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    try:
        parts = urlsplit(address)
        sound = (
            parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", address)
        )
    except ValueError:
        sound = False
    if not sound:
        raise DownloadError(
            f"HF_ENDPOINT={address:.200}: the value is not an address",
            f"HF_ENDPOINT must be the address of a hub, such as {HUB}",
            "correct or unset HF_ENDPOINT",
        )
    return address


def offline() -> bool:
    """Return True if $HF_HUB_OFFLINE or $TRANSFORMERS_OFFLINE disables the network."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def parse(name: str | Path) -> Reference | None:
    """Parse a string that has the form of a reference; return None for other strings.

    Unless the result is `explicit`, the text may also be a path. The forms are org/name, org/name@revision and
    org/name:Q4_K_M, each with an optional prefix hf: (with which the org is optional); a short name in the table of
    configs/models.json in place of org/name; an address on the hub; and https:// and http:// addresses of files,
    optionally followed by #sha256=….

    Raises:
        ModelFolderError: if the text starts like one of these forms, but is malformed.
    """
    text = re.sub(r"^(hf|https?):/(?!/)", r"\1://", str(name).strip())  # a Path collapses the two slashes into one
    if re.match(r"https?://", text):
        return _from_address(text)
    if text.startswith(tuple(f"{host}/" for host in _HUB_HOSTS)):
        return _inside_hub(text.split("/", 1)[1], text)
    explicit = text.startswith("hf:")
    if explicit:
        text = text.removeprefix("hf:").lstrip("/").removeprefix("models/")
    match = _NAME.fullmatch(text)
    if match is not None and not explicit and (known := known_model(match["repo"])):
        return _repository(known.repository, match["revision"], match["part"], str(name), explicit=False)
    if match is None or not ("/" in match["repo"] or explicit):
        if explicit:
            raise _malformed(str(name))
        return None
    if not explicit and _A_FILE.search(match["repo"]):
        return None
    return _repository(match["repo"], match["revision"], match["part"], str(name), explicit=explicit)


def _from_address(text: str) -> Reference:
    try:
        parts = urlsplit(text)
        host, known = parts.hostname or "", urlsplit(endpoint())
        at_hub = host in _HUB_HOSTS or (parts.netloc == known.netloc and parts.scheme == known.scheme)
    except ValueError as error:
        raise _malformed(text) from error
    if parts.username or parts.password:
        raise ModelFolderError(
            f"{parts.scheme}://…@{host}{parts.path:.200}: the file was not downloaded",
            "the address contains a password, and the cache records addresses",
            "download the file with another tool, and pass its path",
        )
    if at_hub:
        return _inside_hub(parts.path.strip("/"), text)
    if not host or not parts.path.rsplit("/", 1)[-1]:
        raise _malformed(text)
    digest = parts.fragment.removeprefix("sha256=").lower() if parts.fragment.startswith("sha256=") else ""
    if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ModelFolderError(
            f"{text:.200}: the checksum is invalid",
            "#sha256= needs 64 hexadecimal digits",
            "correct or remove #sha256=…",
        )
    return Reference(url=text.split("#", 1)[0], digest=digest, explicit=True)


def _inside_hub(path: str, text: str) -> Reference:
    match = _INSIDE.fullmatch(unquote(path.split("?", 1)[0].removeprefix("models/")))
    if match is None or not _NAME.fullmatch(match["repo"]):
        raise _malformed(text)
    revision = "" if match["revision"] == _MAIN else match["revision"]
    return _repository(match["repo"], revision, match["part"], text, explicit=True)


def _repository(repo: str, revision: str | None, part: str | None, text: str, *, explicit: bool) -> Reference:
    if ".." in repo or "--" in repo or (revision and not _SAFE_REVISION.fullmatch(revision)):
        raise _malformed(text)
    return Reference(repo, revision or "", (part or "").strip("/"), explicit=explicit)


def _malformed(text: str) -> ModelFolderError:
    return ModelFolderError(
        f"{text!r:.120} is not a repository name",
        "names have the form org/name, org/name@revision or org/name:Q4_K_M, each with or without the prefix hf:",
        "copy the name, such as Qwen/Qwen3-0.6B, from the model's page",
    )
