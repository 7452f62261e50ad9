"""What names a model that is not a path: a repository on a hub, a file anywhere on the web, a name in the cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import DownloadError, ModelFolderError

HUB = "https://huggingface.co"
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SEGMENT = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
# Names of GGUF files may hold whatever names of files do.
_PART = r"[\w./+-]+|[^\s:/][^:\\]*\.(?i:gguf)"
_NAME = re.compile(rf"(?P<repo>{_SEGMENT}(?:/{_SEGMENT})?)(?:@(?P<revision>[\w./-]+?))?(?::(?P<part>{_PART}))?")
_INSIDE = re.compile(
    r"(?P<repo>[^/]+/[^/]+|[^/]+$)(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<part>.+?))?)?/?"
)
# A path to a file, unless hf: stands before it.
_A_FILE = re.compile(r"\.(gguf|onnx|safetensors|bin|json|pt|pth)$", re.IGNORECASE)
_SAFE_REVISION = re.compile(r"(?!.*(?:\.\.|//))[\w.-][\w./-]{0,199}")
_MAIN = "main"


@dataclass(frozen=True)
class Reference:
    """A model that lies elsewhere.

    Attributes:
        repo: "org/name" on the hub; "" for a file elsewhere.
        revision: a branch, tag or commit; "" = the default branch.
        part: which of several: a GGUF file or its quantisation (Q4_K_M), or an ONNX folder; "" = chosen by rule.
        url: of a file elsewhere; "" for a repository.
        digest: SHA-256 of that file in hexadecimal digits, as it stood behind "#sha256="; "" = not known.
        explicit: it cannot be meant as a path: it began with hf: or https:.
    """

    repo: str = ""
    revision: str = ""
    part: str = ""
    url: str = ""
    digest: str = ""
    explicit: bool = False

    @property
    def name(self) -> str:
        """What it is called in the cache: org/name[@revision][:part], or the URL."""
        if self.url:
            return self.url
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.part}" if self.part else "")


def endpoint() -> str:
    """Where the hub is: $HF_ENDPOINT, or huggingface.co. Raises DownloadError: that is no address."""
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
            f"HF_ENDPOINT={address:.200}: no address", f"it is where the hub is, such as {HUB}", "correct or unset it"
        )
    return address


def offline() -> bool:
    """Whether $HF_HUB_OFFLINE forbids the network."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def parse(name: str | Path) -> Reference | None:
    """What a text refers to, if it has the form of a reference; it may be a path nevertheless, unless it is `explicit`.

    Forms: org/name, org/name@revision, org/name:Q4_K_M, each also behind hf: (where a name needs no org); an address of
    the hub; https:// and http:// addresses of files, with #sha256=… behind them if somebody knows it.

    Raises:
        ModelFolderError: it begins as one of these and goes on as none.
    """
    text = re.sub(r"^(hf|https?):/(?!/)", r"\1://", str(name).strip())  # a Path has swallowed one of the slashes
    if re.match(r"https?://", text):
        return _from_address(text)
    if text.startswith(tuple(f"{host}/" for host in _HUB_HOSTS)):
        return _inside_hub(text.split("/", 1)[1], text)
    explicit = text.startswith("hf:")
    if explicit:
        text = text.removeprefix("hf:").lstrip("/").removeprefix("models/")
    match = _NAME.fullmatch(text)
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
            f"{parts.scheme}://…@{host}{parts.path:.200}: not fetched",
            "the address holds a password, and addresses are written down in the cache",
            "fetch the file with another tool, and give its path",
        )
    if at_hub:
        return _inside_hub(parts.path.strip("/"), text)
    if not host or not parts.path.rsplit("/", 1)[-1]:
        raise _malformed(text)
    digest = parts.fragment.removeprefix("sha256=").lower() if parts.fragment.startswith("sha256=") else ""
    if digest and not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ModelFolderError(f"{text:.200}: not fetched", "#sha256= takes 64 hexadecimal digits", "correct them")
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
        f"{text!r:.120}: no name of a repository",
        "org/name, org/name@revision and org/name:Q4_K_M are names, also behind hf:",
        "copy the name from the model's page, such as Qwen/Qwen3-0.6B",
    )
