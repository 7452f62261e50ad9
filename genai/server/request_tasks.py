"""The tasks that serve requests: they end when the client closes the connection, or when the server is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import RequestError
from .sse import ClientGone, Receive


class RequestTasks:
    """Base class of servers, with the tasks of their running requests. Only the event loop's thread uses it.

    Args:
        owner: the kind of server in messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopped = False

    @property
    def num_tasks(self) -> int:
        """The number of tasks that serve requests."""
        return len(self._tasks)

    def note_running(self, task: asyncio.Task[Any]) -> None:
        """Note a task that serves a request, so that `stop_running` can end it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_running(self) -> None:
        """End all running requests with an error."""
        self._is_stopped = True
        for task in [*self._tasks]:
            task.cancel()

    def stop_error(self) -> RequestError | None:
        """Return the error of requests that `stop_running` ended; None if it was not called."""
        if not self._is_stopped:
            return None
        return RequestError(
            503, f"the {self._owner} was stopped before the reply ended",
            "its time limit for running requests passed, or a second signal ended them",
            "send the request again later", code="stopping", headers={"retry-after": "1"},
        )  # fmt: skip


async def finish_unless_gone(serving: asyncio.Task[None], receive: Receive) -> None:
    """Wait for the task of a request, and cancel it when the client closes the connection.

    Raises:
        ClientGone: the client closed the connection.
        Exception: any error of the task.
    """
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise ClientGone
        serving.result()
    finally:
        for task in (serving, watching):
            task.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
