"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for adapters in the folder that the server allows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import ConfigError, ModelFolderError, RequestError
from ..calls import Call, TextReply, converted


class LoadRequest(msgspec.Struct):
    """The name and the path of an adapter."""

    lora_name: str
    lora_path: str


class UnloadRequest(msgspec.Struct):
    """The name of an adapter."""

    lora_name: str


MOST_ADAPTERS = 256
"""The number of loaded adapters from which on requests cannot load another, so that they do not fill the memory."""


async def load(call: Call) -> TextReply:
    """Load an adapter under a name. Running requests continue."""
    folder = _folder(call)
    request: LoadRequest = converted(call.json(), LoadRequest)
    server, name = call.server, request.lora_name
    path = _path(folder, request.lora_path)
    if name in server.model_names:
        raise RequestError(
            400, f"the name {name!r:.200} is in use", "each adapter has its own name",
            "unload the adapter first, or choose another name", param="lora_name",
        )  # fmt: skip
    if not name.isprintable() or "+" in name:
        raise RequestError(
            400, f"the name {name!r:.200} cannot be used", "names have no control characters and no +",
            "choose another name", param="lora_name",
        )  # fmt: skip
    if len(server.adapters) >= MOST_ADAPTERS:
        raise RequestError(
            400, f"{len(server.adapters)} adapters are loaded", f"requests can load up to {MOST_ADAPTERS}",
            "unload an adapter first", code="too_many_adapters", param="lora_name",
        )  # fmt: skip
    try:
        await server.in_thread(server.llm.load_adapter, path, name)
    except (ModelFolderError, ConfigError) as error:  # these are errors of the server's start elsewhere
        raise RequestError(
            400, error.what, error.why, error.fix, code="adapter_not_usable", param="lora_path"
        ) from error
    return TextReply(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(call: Call) -> TextReply:
    """Unload an adapter. Running requests continue to use it."""
    _folder(call)
    request: UnloadRequest = converted(call.json(), UnloadRequest)
    name = request.lora_name
    if name not in call.server.adapters:
        raise RequestError(
            404, f"there is no adapter {name!r:.200}", f"loaded: {', '.join(call.server.adapters) or 'none'}"[:300],
            "use the name of a loaded adapter", code="adapter_not_found", param="lora_name",
        )  # fmt: skip
    await call.server.in_thread(call.server.llm.unload_adapter, name)
    return TextReply(f"Success: LoRA adapter '{name}' removed successfully.")


def _path(folder: Path, given: str) -> Path:
    """Return the path of an adapter. Raise RequestError if it is not in the folder."""
    try:
        path = (folder / given).resolve()
        is_there = path.is_relative_to(folder) and path.exists()
    except (OSError, ValueError):  # the path is too long, or has a null character
        is_there = False
    if not is_there:
        raise RequestError(
            404, f"there is no adapter {given!r:.200}", "adapters are in the folder of --adapter-dir",
            "use a path in this folder", code="adapter_not_found", param="lora_path",
        )  # fmt: skip
    return path


def _folder(call: Call) -> Path:
    folder = call.server.options.adapter_dir
    if folder is None:
        raise RequestError(
            403, "adapters cannot be loaded or unloaded", "the server was started without --adapter-dir",
            "start the server with --adapter-dir FOLDER", code="adapters_not_allowed",
        )  # fmt: skip
    return folder.resolve()


ROUTES = (
    ("POST", "/v1/load_lora_adapter", load, False),
    ("POST", "/v1/unload_lora_adapter", unload, False),
)
