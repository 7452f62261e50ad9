"""`genai serve`: an HTTP server for the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genai.common.progress import quietly
from genai.errors import OptionError

from . import listening, options as opt
from .listening import checked_keys, say_stopping
from .model_names import request_name
from .serve_models import MAX_SEQUENCES, EmbedderOption, RerankerOption, served_models
from .serve_ray import RayFlags, serve_replicas
from .serve_router import ModelsArgument, RouterFlags, make_router
from .terminal import say

if TYPE_CHECKING:
    from genai.server.serving import Server


@opt.flag_groups
def serve(
    model: ModelsArgument = None,
    *,
    host: listening.Host = "127.0.0.1",
    port: listening.Port = 8000,
    api_key_file: listening.KeyFile = None,
    insecure: listening.Insecure = False,
    tls_cert: listening.TlsCert = None,
    tls_key: listening.TlsKey = None,
    allow_host: listening.AllowHost = None,
    allow_origin: listening.AllowOrigin = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model in requests [default: the last part of MODEL].")
    ] = None,
    max_sequences: Annotated[
        int, opt.model_option("--max-sequences", help="Maximum number of replies generated concurrently.", min=1)
    ] = MAX_SEQUENCES,
    max_queue: Annotated[
        int, typer.Option("--max-queue", help="Maximum number of waiting requests; others get status 429.", min=0)
    ] = 256,
    max_per_key: Annotated[
        int | None, typer.Option("--max-per-key", help="Maximum number of concurrent requests per API key.", min=1)
    ] = None,
    max_body: listening.MaxBody = 16,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Maximum number of seconds per request [default: no limit].")
    ] = None,
    drain_timeout: listening.DrainTimeout = 30.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse fields that have no effect, instead of naming them in a header.")
    ] = False,
    request_log: Annotated[
        Path | None, opt.output_option("--request-log", help="Append one JSON line per request to this file.")
    ] = None,
    log_prompts: Annotated[
        bool, opt.output_option("--log-prompts", help="With --request-log: also write the bodies of requests.")
    ] = False,
    traces: Annotated[
        bool,
        opt.output_option("--traces", help="Send OpenTelemetry traces of requests to OTEL_EXPORTER_OTLP_ENDPOINT."),
    ] = False,
    keep_headers: Annotated[
        bool, typer.Option("--keep-headers", help="Keep the lines of agents that change with each request.")
    ] = False,
    adapter_dir: Annotated[
        Path | None, typer.Option("--adapter-dir", help="Folder from which requests may load and unload adapters.")
    ] = None,
    batch_dir: Annotated[
        Path | None, typer.Option("--batch-dir", help="Private folder for /v1/files and /v1/batches.")
    ] = None,
    ollama: Annotated[
        bool, typer.Option("--ollama", help="Also serve Ollama's API below /api; its clients expect --port 11434.")
    ] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no chat page at /.")] = False,
    reuse_replies: Annotated[
        bool,
        typer.Option(
            "--reuse-replies",
            help="Reuse the cache of replies in later turns: faster, but replies depend on earlier requests.",
        ),
    ] = False,
    embedder: EmbedderOption = None,
    reranker: RerankerOption = None,
    router: RouterFlags,
    cluster: RayFlags,
    flags: opt.EngineFlags,
) -> None:
    """Serve one or more models over HTTP for clients of the APIs of OpenAI and Anthropic.

    The server accepts requests of this machine only, unless --host is another address. SIGTERM or Ctrl-C stops it when
    the running requests have ended. Every adapter that --lora names is a model of its own in requests. Several models
    are loaded when a request needs them, and unloaded to make room for others. With --ray, replicas of the server run
    on a cluster, and a reply whose replica fails continues on another one.
    """
    from genai.server.run import Address, check_packages, serve as run

    check_packages()
    models = list(model or ())
    address = Address(host, port, tls_cert, tls_key)
    keys = checked_keys(address, api_key_file, insecure=insecure, allow_host=allow_host, risk="could use the model")
    from genai.server.request_log import RequestLog
    from genai.server.serving import Server, ServerOptions
    from genai.server.traces import Traces

    options = ServerOptions(
        keys=keys, max_queue=max_queue, max_per_key=max_per_key, timeout=timeout, max_body=max_body * 2**20,
        strict=strict, reuse_replies=reuse_replies, allowed_hosts=address.hosts(tuple(allow_host or ())),
        allowed_origins=tuple(allow_origin or ()), drain_seconds=drain_timeout,
        keep_headers=keep_headers, adapter_dir=adapter_dir, batch_dir=batch_dir, page=not no_page,
        ollama=ollama,
    )  # fmt: skip
    if log_prompts and request_log is None:
        raise OptionError(
            "--log-prompts cannot be used without --request-log", "there is no log", "add --request-log FILE"
        )
    cluster.check(
        {
            "a second MODEL": len(models) > 1, "--models": router.models, "--memory": router.memory,
            "--keep": router.keep, "--pin": router.pin, "--embedder": embedder, "--reranker": reranker,
            "--adapter-dir": adapter_dir, "--batch-dir": batch_dir, "--request-log": request_log, "--traces": traces,
        }
    )  # fmt: skip
    if cluster.ray is not None:
        single = models[0] if models else None
        serve_replicas(single, name, address, options, flags, cluster, max_sequences=max_sequences)
        return
    log = RequestLog(request_log, with_prompts=log_prompts) if request_log is not None else None
    sender = Traces() if traces else None
    server: Server
    with ExitStack() as stack:
        if sender is not None:
            stack.callback(sender.close)
        bound = stack.enter_context(address.bind())
        if router.is_used(models):
            if name is not None:
                raise OptionError(
                    f"--name {name:.80} cannot be used with several models", "each model has its name",
                    "choose the names in a file, and pass it with --models",
                )  # fmt: skip
            server = make_router(
                models, (embedder, reranker), router, flags, options, max_sequences=max_sequences, log=log,
                traces=sender,
            )  # fmt: skip
        else:
            single, flags = flags.with_adapter(models[0] if models else None)
            served = served_models(single, embedder, reranker, flags, options, max_sequences=max_sequences)
            llm, encoders = stack.enter_context(served)
            if name is None and single is not None and llm is not None:
                name = request_name(single)
            server = Server(llm, options, name=name, log=log, encoders=encoders, traces=sender)
        stack.enter_context(quietly(flags.quiet))
        url = address.url(bound)
        stack.enter_context(_listed(url, server))
        try:
            on_stop = partial(say_stopping, "serve", drain_timeout)
            run(server, bound, address, lambda: say(f"genai serve: {server.title} at {url}/v1"), on_stop)
        except KeyboardInterrupt:
            say("genai serve: stopped; the running requests ended with an error")
            raise typer.Exit(130) from None
        finally:
            server.close()
            if log is not None:
                log.close()


@contextmanager
def _listed(url: str, server: Server) -> Iterator[None]:
    """Let `genai ps` list a server while it runs."""
    from genai.server.registry import registered
    from genai.server.router import Router

    needs_key = bool(server.options.keys)
    if isinstance(server, Router):
        encoders = [one.name for one in server.models.values() if one.kind != "completion"]
        with registered(url, server.model_names, encoders, loaded=[], needs_key=needs_key) as note_loaded:
            server.watch_loads(note_loaded)
            yield
    else:
        encoders = server.encoders.names
        with registered(url, [*server.model_names, *encoders], encoders, needs_key=needs_key):
            yield
