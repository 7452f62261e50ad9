"""The settings with which clients of other projects use a server, as files and as environment variables."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.atomic_files import replacing
from ..common.reading import read_text_file
from ..errors import InputError


@dataclass(frozen=True)
class ClientSetup:
    """The settings of a client.

    Attributes:
        path: the client's file.
        settings: the settings to add, nested.
        text: the settings in the form of the file.
        command: the command that starts the client.
        merge: returns the file's text with the settings, given its earlier text.
    """

    path: Path
    settings: Mapping[str, Any]
    text: str
    command: str
    merge: Callable[[Path, str, Mapping[str, Any]], str]

    def write(self) -> bool:
        """Add the settings to the client's file, and leave all others unchanged. Return False if they are present.

        Raises:
            InputError: the file cannot be read, or has other values for these settings.
        """
        earlier = read_text_file(self.path) if self.path.exists() else ""
        merged = self.merge(self.path, earlier, self.settings)
        if merged == earlier:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(merged.encode())
        return True


def _env_text(variables: Mapping[str, Any]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())


KEY_VARIABLE = "LOCAL_GENAI_KEY"
"""The environment variable from which Codex reads the API key."""


def setup_of(
    client: str, url: str, model: str, home: Path, models: Sequence[str] = (), key: str | None = None
) -> ClientSetup:
    """Return the settings of a client in CLIENTS.

    Args:
        client: the client.
        url: the address of the server, without a path.
        model: the name of the model.
        home: the user's home folder.
        models: the names of all models that the user can choose from in a client with several models.
        key: an API key of the server; None = the server has no keys.
    """
    return CLIENTS[client](url, model, home, models, key)


def _codex(url: str, model: str, home: Path, models: Sequence[str], key: str | None) -> ClientSetup:
    provider = {"name": "genai", "base_url": f"{url}/v1", "wire_api": "responses"}
    command = "codex --profile genai"
    if key is not None:  # Codex reads keys from the environment only
        provider["env_key"] = KEY_VARIABLE
        command = f"env {KEY_VARIABLE}={shlex.quote(key)} {command}"
    settings = {
        "model_providers": {"genai": provider},
        "profiles": {"genai": {"model": model, "model_provider": "genai"}},
    }
    return ClientSetup(home / ".codex/config.toml", settings, _toml(settings), command, _merge_toml)


def _claude(url: str, model: str, home: Path, models: Sequence[str], key: str | None) -> ClientSetup:
    settings = {
        "env": {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key or "none", "ANTHROPIC_MODEL": model},
    }
    return ClientSetup(home / ".claude/settings.json", settings, _json(settings), "claude", _merge_json)


def _opencode(url: str, model: str, home: Path, models: Sequence[str], key: str | None) -> ClientSetup:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "genai",
        "options": {"baseURL": f"{url}/v1", **({} if key is None else {"apiKey": key})},
        "models": {name: {"name": name} for name in dict.fromkeys([model, *models])},
    }
    settings = {"provider": {"genai": provider}}
    path = home / ".config/opencode/opencode.json"
    return ClientSetup(path, settings, _json(settings), f"opencode --model genai/{model}", _merge_json)


def _openwebui(url: str, model: str, home: Path, models: Sequence[str], key: str | None) -> ClientSetup:
    settings = {"OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key or "none"}
    path = home / ".config/genai/openwebui.env"
    command = f"env $(cat {path}) open-webui serve --port 3000"
    return ClientSetup(path, settings, _env_text(settings), command, _merge_env)


CLIENTS: Mapping[str, Callable[[str, str, Path, Sequence[str], str | None], ClientSetup]] = {
    "codex": _codex, "claude": _claude, "opencode": _opencode, "openwebui": _openwebui,
}  # fmt: skip
"""The known clients by name."""


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _toml(settings: Mapping[str, Any], prefix: str = "") -> str:
    """Return nested tables of texts in the form of TOML."""
    found = ""
    for name, table in settings.items():
        values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
        if values:
            lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
            found += f"\n[{prefix}{name}]\n" + "".join(lines)
        found += _toml({key: value for key, value in table.items() if isinstance(value, Mapping)}, f"{prefix}{name}.")
    return found.lstrip("\n") if not prefix else found


def _missing(path: Path, earlier: Any, settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the settings that a file lacks. Raise InputError if it has another value for one of them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(earlier, Mapping) or name not in earlier:
            found[name] = value
        elif isinstance(value, Mapping) and isinstance(earlier[name], Mapping):
            if inner := _missing(path, earlier[name], value, f"{where}{name}."):
                found[name] = inner
        elif earlier[name] != value:
            raise InputError(
                f"{path} has another value for {where}{name}", f"it is {earlier[name]!r:.100}, not {value!r:.100}",
                "change or remove it in the file, and run the command again",
            )  # fmt: skip
    return found


def _merge_json(path: Path, earlier: str, settings: Mapping[str, Any]) -> str:
    try:
        content = json.loads(earlier) if earlier.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON", str(error), "correct the file, or add the settings by hand") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a JSON object", "settings have names", "add the settings by hand")
    missing = _missing(path, content, settings)
    return _json(_joined(content, missing)) if missing else earlier


def _joined(content: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _joined(content[name], more[name]) for name in more if isinstance(content.get(name), Mapping)}
    return {**content, **more, **both}


def _merge_toml(path: Path, earlier: str, settings: Mapping[str, Any]) -> str:
    try:
        content = tomllib.loads(earlier)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML", str(error), "correct the file, or add the settings by hand") from error
    missing = _missing(path, content, settings)
    if not missing:
        return earlier
    merged = f"{earlier.rstrip()}\n\n{_toml(missing)}".lstrip("\n")
    try:  # a table that the file has in part cannot be opened again
        tomllib.loads(merged)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} has a part of these settings", str(error), "add the others by hand") from error
    return merged


def _merge_env(path: Path, earlier: str, settings: Mapping[str, Any]) -> str:
    lines = [line.partition("=") for line in earlier.splitlines() if "=" in line and not line.lstrip().startswith("#")]
    missing = _missing(path, {name.strip(): value for name, _, value in lines}, settings)
    begin = earlier if not earlier or earlier.endswith("\n") else f"{earlier}\n"
    return begin + _env_text(missing) if missing else earlier
