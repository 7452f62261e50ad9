"""Replicas of a server on a Ray cluster: each runs the whole application, and Ray Serve restarts those that fail."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..common.log import logger
from ..errors import MissingPackageError, StateError
from ..llm.batch.cluster import check_listens
from .app import App, build_app
from .serving import Server, ServerOptions

SESSION_HEADER = "x-session-id"
"""The header by which Ray Serve selects the replica of a request."""

_log = logger(__name__)
_SETTING = {"RAY_SERVE_SESSION_ID_HEADER_KEY": SESSION_HEADER}
# The seconds in which Ray's control server must start. Ray's default of 30 is too short on a busy machine. The limit of
# 30 s for its other processes (`Node.__init__` in Ray 2.60) cannot be changed, so the start is repeated.
_START = ("RAY_gcs_server_port_wait_time_s", "120")
_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_NAME = "genai"
_MOST_REQUESTS, _STARTS = 10_000, 3


@dataclass(frozen=True)
class Replica:
    """The model and the options of a replica.

    Attributes:
        folder: the model's folder, at the same path on each node.
        name: the name of the model in requests.
        model: arguments of genai.LLM.
        adapters: names, paths and scales of the adapters.
        options: the options of the server.
    """

    folder: str
    name: str
    model: Mapping[str, Any] = field(default_factory=dict)
    adapters: Sequence[tuple[str, str, float]] = ()
    options: ServerOptions = field(default_factory=ServerOptions)

    def application(self) -> App:
        """Load the model, and return the application."""
        from ..llm.llm import LLM

        llm = LLM(self.folder, lora=bool(self.adapters), **self.model)
        for name, path, scale in self.adapters:
            llm.load_adapter(path, name, scale)
        return build_app(Server(llm, self.options, name=self.name))


@contextmanager
def ray_replicas(replica: Replica, address: str, count: int | None = None) -> Iterator[str]:
    """Run replicas with Ray Serve while the block runs, and yield the address of Ray Serve's proxy.

    Args:
        replica: the replica.
        address: address of the cluster. "auto" finds a running cluster; "local" starts a cluster on this machine.
        count: number of replicas; None = one per node.

    Raises:
        MissingPackageError: Ray Serve is not installed.
        StateError: there is no cluster at the address, or the replicas cannot be started.
    """
    os.environ |= _SETTING  # Ray reads it when it is imported
    os.environ.setdefault(*_START)
    ray, serve = _imported()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _connect(ray, address)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        yield _started(serve, replica, count or nodes)
    finally:
        serve.shutdown()
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start one. Raise StateError if there is none."""
    for left in reversed(range(_STARTS if address == "local" else 1)):
        try:
            check_listens(address)
            ray.init(address, log_to_driver=False, include_dashboard=False, logging_level="error",
                     runtime_env={"env_vars": _SETTING})  # fmt: skip
            return
        except Exception as error:  # exceptions from Ray and from sockets
            ray.shutdown()
            if left:
                _log.warning("Ray did not start, and is started again: %s", f"{error}"[:300])
                continue
            fix = "free processor time or memory" if address == "local" else "start a cluster (ray start --head)"
            raise StateError(
                f"no Ray cluster at {address}", f"{error}"[:300], f"{fix}, or check the address"
            ) from error


def _started(serve: Any, replica: Replica, count: int) -> str:
    from ray.serve.config import RequestRouterConfig

    port = _free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": None})
        deployment = serve.deployment(
            name=_NAME,
            num_replicas=count,
            max_ongoing_requests=_MOST_REQUESTS,
            health_check_period_s=1,
            graceful_shutdown_timeout_s=replica.options.drain_seconds,
            ray_actor_options={"num_cpus": 1},
            request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        )
        serve.run(deployment(serve.ingress(_builder(replica))()).bind(), name=_NAME, route_prefix="/")
    except Exception as error:
        raise StateError(
            "the replicas cannot be started", f"{error}"[:500], "correct the cause, and start the server again"
        ) from error
    return f"http://127.0.0.1:{port}"


def _builder(replica: Replica) -> Any:
    def build() -> App:
        return replica.application()

    return build


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _imported() -> tuple[Any, Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics to its developers
    try:
        import ray
        from ray import serve
    except ImportError:
        raise MissingPackageError(
            "replicas on a Ray cluster need Ray Serve", "the package is not installed", "run pip install 'ray[serve]'"
        ) from None
    return ray, serve
