"""/v1/files: OpenAI's API for the files of batches."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qs

from ...errors import RequestError
from ..calls import Call, FileReply, JsonReply
from ..file_store import Entry, owner_of
from ..forms import read_form

if TYPE_CHECKING:
    from ..batches import Batches

_MOST_LISTED, _MOST_PARAMETERS = 10_000, 20


async def upload(call: Call) -> JsonReply:
    """Store a file."""
    batches = enabled(call)
    form = await asyncio.to_thread(read_form, call.headers.get("content-type", ""), call.body)
    file, purpose = form.get("file"), form.get("purpose")
    for name, part in (("file", file), ("purpose", purpose)):
        if part is None:
            raise RequestError(
                400, f"{name} is missing", "the field is required", f"add {name}",
                code="missing_required_parameter", param=name,
            )  # fmt: skip
    assert file is not None and purpose is not None
    if purpose.text != "batch":
        raise RequestError(
            400, f"purpose = {purpose.text!r:.80}", "only files of batches can be stored", "use batch", param="purpose"
        )
    if not file.data:
        raise RequestError(
            400, "the file is empty", "a batch needs requests", "send one request per line", param="file"
        )
    call.note_ignored([name for name in form if name not in ("file", "purpose")])
    name = (file.filename or "file.jsonl")[:255]
    data = file.data

    def write(target: BinaryIO) -> None:
        target.write(data)

    made = await asyncio.to_thread(batches.files.add, owner_of(call.key), name, "batch", write)
    return JsonReply(shown(made))


async def list_files(call: Call) -> JsonReply:
    """List the files of a key."""
    batches, query = enabled(call), query_of(call)
    purpose, owner = query.get("purpose"), owner_of(call.key)
    found = batches.files.entries.all(
        lambda entry: entry["owner"] == owner and purpose in (None, entry["purpose"]),
        newest_first=_order(query) == "desc",
    )
    return JsonReply(page([shown(entry) for entry in found], query, _MOST_LISTED, _MOST_LISTED))


async def retrieve(call: Call) -> JsonReply:
    """Return the description of a file."""
    return JsonReply(shown(enabled(call).files.entries.find(call.path["id"], owner_of(call.key))))


async def content(call: Call) -> FileReply:
    """Return the content of a file."""
    batches = enabled(call)
    entry = batches.files.entries.find(call.path["id"], owner_of(call.key))
    return FileReply(batches.files.path(entry["id"]))


async def delete(call: Call) -> JsonReply:
    """Delete a file."""
    batches = enabled(call)
    entry = batches.files.entries.find(call.path["id"], owner_of(call.key))
    if batches.uses(entry["id"]):
        raise RequestError(
            409, "the file is used by a batch", "the batch has not ended", "cancel the batch first", code="file_in_use"
        )
    await asyncio.to_thread(batches.files.delete, entry["id"])
    return JsonReply({"id": entry["id"], "object": "file", "deleted": True})


def enabled(call: Call) -> Batches:
    """Return the batches of the server. Raise RequestError if the server has no folder for them."""
    if call.server.batches is None:
        raise RequestError(
            404, "this server stores no files", "it was started without --batch-dir",
            "start the server with --batch-dir FOLDER", code="batches_not_enabled",
        )  # fmt: skip
    return call.server.batches


def shown(entry: Entry) -> dict[str, Any]:
    """Return the description of a file as clients see it."""
    return {name: value for name, value in entry.items() if name != "owner"}


def query_of(call: Call) -> dict[str, str]:
    """Return the parameters of a query. Raise RequestError if there are too many."""
    try:
        return {name: values[-1] for name, values in parse_qs(call.query, max_num_fields=_MOST_PARAMETERS).items()}
    except ValueError as error:
        raise RequestError(
            400, "the query has too many parameters", f"the limit is {_MOST_PARAMETERS}", "send fewer parameters"
        ) from error


def _order(query: dict[str, str]) -> str:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(400, f"order = {order!r:.80}", "allowed: asc, desc", "use one of these", param="order")
    return order


def page(entries: list[dict[str, Any]], query: dict[str, str], usual: int, most: int) -> dict[str, Any]:
    """Return a part of a list, after the entry that the query names."""
    text = query.get("limit", str(usual))
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(400, f"limit = {text!r:.80}", f"1 to {most} is expected", "leave limit out", param="limit")
    begin, after = 0, query.get("after")
    if after is not None:
        begin = next((index + 1 for index, entry in enumerate(entries) if entry["id"] == after), -1)
        if begin < 0:
            raise RequestError(
                400, f"after = {after!r:.80}", "there is no such entry", "use an id of the list", param="after"
            )
    data = entries[begin : begin + int(text)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": begin + len(data) < len(entries)}


ROUTES = (
    ("POST", "/v1/files", upload, False),
    ("GET", "/v1/files", list_files, False),
    ("GET", "/v1/files/{id}", retrieve, False),
    ("DELETE", "/v1/files/{id}", delete, False),
    ("GET", "/v1/files/{id}/content", content, False),
)
