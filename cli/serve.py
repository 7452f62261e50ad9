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

from . import options as opt
from .model_names import request_name
from .serve_models import MAX_SEQUENCES, EmbedderOption, RerankerOption, served_models
from .serve_router import ModelsArgument, RouterFlags, make_router
from .terminal import say

if TYPE_CHECKING:
    from genai.server.serving import Server


@opt.flag_groups
def serve(
    model: ModelsArgument = None,
    *,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; other machines reach addresses other than 127.0.0.1.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 = a free port.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the accepted API keys: KEY or NAME KEY per line.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach without API keys.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM file with the TLS certificate chain.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM file with the TLS private key.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Further name of this server in the Host header; may be repeated."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", help="Origin of web pages that may use the server; may be repeated."),
    ] = None,
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
    max_body: Annotated[int, typer.Option("--max-body", help="Maximum size of a request body in MiB.", min=1)] = 16,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Maximum number of seconds per request [default: no limit].")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", help="Seconds that running requests may take after SIGTERM.")
    ] = 30.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse fields that have no effect, instead of naming them in a header.")
    ] = False,
    request_log: Annotated[
        Path | None, opt.output_option("--request-log", help="Append one JSON line per request to this file.")
    ] = None,
    log_prompts: Annotated[
        bool, opt.output_option("--log-prompts", help="With --request-log: also write the bodies of requests.")
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
    flags: opt.EngineFlags,
) -> None:
    """Serve one or more models over HTTP for clients of the APIs of OpenAI and Anthropic.

    The server accepts requests of this machine only, unless --host is another address. SIGTERM or Ctrl-C stops it when
    the running requests have ended. Every adapter that --lora names is a model of its own in requests. Several models
    are loaded when a request needs them, and unloaded to make room for others.
    """
    from genai.server.keys import read_keys
    from genai.server.run import Address, check_packages, serve as run

    check_packages()
    models = list(model or ())
    address = Address(host, port, tls_cert, tls_key)
    address.check()
    keys = read_keys(api_key_file) if api_key_file is not None else []
    if not address.is_local and not keys and not insecure:
        raise OptionError(
            f"--host {host} needs API keys",
            "other machines can reach this address, and could use the model",
            "add --api-key-file FILE, or --insecure if the network is trusted",
        )
    if insecure and (keys or address.is_local):
        reason = "--api-key-file protects the server" if keys else f"only this machine reaches {host}"
        raise OptionError("--insecure has no effect", reason, "remove --insecure")
    if allow_host and not address.is_local:
        raise OptionError(
            f"--allow-host cannot be used with --host {host}",
            "the Host header is checked only for addresses that other machines do not reach", "remove --allow-host",
        )  # fmt: skip
    from genai.server.request_log import RequestLog
    from genai.server.serving import Server, ServerOptions

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
    log = RequestLog(request_log, with_prompts=log_prompts) if request_log is not None else None
    server: Server
    with ExitStack() as stack:
        bound = stack.enter_context(address.bind())
        if router.is_used(models):
            if name is not None:
                raise OptionError(
                    f"--name {name:.80} cannot be used with several models", "each model has its name",
                    "choose the names in a file, and pass it with --models",
                )  # fmt: skip
            server = make_router(
                models, (embedder, reranker), router, flags, options, max_sequences=max_sequences, log=log
            )
        else:
            single, flags = flags.with_adapter(models[0] if models else None)
            served = served_models(single, embedder, reranker, flags, options, max_sequences=max_sequences)
            llm, encoders = stack.enter_context(served)
            if name is None and single is not None and llm is not None:
                name = request_name(single)
            server = Server(llm, options, name=name, log=log, encoders=encoders)
        stack.enter_context(quietly(flags.quiet))
        url = address.url(bound)
        stack.enter_context(_listed(url, server))
        try:
            on_stop = partial(_say_stopping, drain_timeout)
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

    if isinstance(server, Router):
        encoders = [one.name for one in server.models.values() if one.kind != "completion"]
        with registered(url, server.model_names, encoders, loaded=[]) as note_loaded:
            server.watch_loads(note_loaded)
            yield
    else:
        encoders = server.encoders.names
        with registered(url, [*server.model_names, *encoders], encoders):
            yield


def _say_stopping(seconds: float, running: int) -> None:
    requests = "1 request" if running == 1 else f"{running} requests"
    say(f"genai serve: finishing {requests} in at most {seconds:g} seconds; Ctrl-C stops at once")
