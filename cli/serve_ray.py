"""`genai serve --ray`: replicas of the server on a Ray cluster, behind one address."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai.common.progress import task
from genai.errors import OptionError

from . import options as opt
from .listening import say_stopping
from .model_names import request_name
from .terminal import say

if TYPE_CHECKING:
    from genai.server.run import Address
    from genai.server.serving import ServerOptions

# Ray needs about a second to replace a failed replica in its lists, and more if the machine is busy.
_ATTEMPTS = 8


@dataclasses.dataclass(frozen=True)
class RayFlags:
    """Options for replicas on a Ray cluster."""

    ray: Annotated[
        str | None,
        typer.Option("--ray", help="Serve replicas on a Ray cluster: HOST:PORT, auto (discover) or local."),
    ] = None
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", help="Number of replicas with --ray [default: one per node].", min=1),
    ] = None

    def check(self, others: Mapping[str, object]) -> None:
        """Raise OptionError if an option does not apply.

        Args:
            others: values of options that cannot be used with --ray; None or False = not set.
        """
        if self.ray is None and self.replicas is not None:
            raise OptionError(
                "--replicas cannot be used without --ray", "--replicas sets the number of servers in a Ray cluster",
                "add --ray local, or remove --replicas",
            )  # fmt: skip
        named = next((name for name, value in others.items() if value), None)
        if self.ray is not None and named is not None:
            raise OptionError(
                f"{named} cannot be used with --ray", "each replica serves one model, and stores no files",
                f"remove one of the two, or start the servers with {named}, and `genai balance` in front of them",
            )  # fmt: skip


def serve_replicas(
    model: Path | None, name: str | None, address: Address, options: ServerOptions, flags: opt.EngineFlags,
    chosen: RayFlags, *, max_sequences: int,
) -> None:  # fmt: skip
    """Serve replicas until SIGTERM or Ctrl-C."""
    from genai.server.balancer import Balancer, BalancerOptions
    from genai.server.ray_replicas import SESSION_HEADER, Replica, ray_replicas
    from genai.server.registry import registered
    from genai.server.run import serve as run

    model, flags = flags.with_adapter(model)
    adapters = [(name, str(path.absolute()), scale) for name, path, scale in map(opt.read_lora, flags.lora or ())]
    folder = flags.folder_of(model)
    settings = {
        **flags.options, **flags.prefix_options, "context_size": flags.ctx_size, "max_sequences": max_sequences,
        "speculation": flags.speculation(), "quiet": True,
    }  # fmt: skip
    # The balancer checks the names of hosts and origins; the replicas check the keys.
    inner = dataclasses.replace(options, allowed_hosts=(), allowed_origins=())
    served = name or (folder.name if model is None else request_name(model))
    replica = Replica(str(folder.absolute()), served, settings, adapters, inner)
    outer = BalancerOptions(
        max_body=options.max_body, allowed_hosts=options.allowed_hosts, allowed_origins=options.allowed_origins,
        drain_seconds=options.drain_seconds, attempts=_ATTEMPTS, session_header=SESSION_HEADER,
    )  # fmt: skip
    assert chosen.ray is not None
    with address.bind() as bound, ExitStack() as stack:
        with task("Starting the replicas"):
            proxy = stack.enter_context(ray_replicas(replica, chosen.ray, chosen.replicas))
        url = address.url(bound)
        stack.enter_context(registered(url, [served, *(one for one, _, _ in adapters)], needs_key=bool(options.keys)))
        try:
            stopping = partial(say_stopping, "serve", options.drain_seconds)
            said = f"genai serve: {served} with Ray at {url}/v1"
            run(Balancer([proxy], outer), bound, address, lambda: say(said), stopping)
        except KeyboardInterrupt:
            say("genai serve: stopped; the running requests ended with an error")
            raise typer.Exit(130) from None
