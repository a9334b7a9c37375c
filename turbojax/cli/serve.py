"""`turbojax serve`: a model behind OpenAI's protocol, and a proxy before several."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from turbojax.chat_template import read_chat_template
from turbojax.cli import options, serve_log, session
from turbojax.cli import serve_options as of
from turbojax.cli.grouped import grouped
from turbojax.cli.serve_proxy import proxy
from turbojax.configs import EngineConfig
from turbojax.errors import MissingExtraError
from turbojax.hub import DEFAULT_FILE
from turbojax.serve.settings import ServeConfig

serve = typer.Typer(name="serve", help="Serve models over HTTP.", no_args_is_help=True)
serve.command()(proxy)


@serve.command("api_server")
@grouped
def api_server(
    processes: options.Processes,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a .gguf file or a Hugging Face repo id; default: SmolLM2-135M-Instruct."),
    ] = None,
    server_name: of.ServerName = None,
    server_port: of.ServerPort = None,
    model_name: of.ModelName = None,
    dtype: options.Dtype = None,
    model_format: options.ModelFormat = None,
    session_len: options.SessionLen = None,
    max_batch_size: options.MaxBatchSize = None,
    quant_policy: options.QuantPolicy = None,
    cache_max_entry_count: options.CacheMaxEntryCount = None,
    cache_block_seq_len: of.CacheBlockSeqLen = None,
    enable_prefix_caching: of.EnablePrefixCaching = None,
    max_prefill_token_num: of.MaxPrefillTokenNum = None,
    max_queue_len: of.MaxQueueLen = None,
    tp: options.Tp = None,
    dp: options.Dp = None,
    chat_template: of.ChatTemplate = None,
    tool_call_parser: of.ToolCallParser = None,
    reasoning_parser: of.ReasoningParser = None,
    max_connections: of.MaxConnections = None,
    max_concurrent_requests: of.MaxConcurrentRequests = None,
    max_body_bytes: of.MaxBodyBytes = None,
    max_upload_bytes: of.MaxUploadBytes = None,
    max_json_depth: of.MaxJsonDepth = None,
    min_priority: of.MinPriority = None,
    receive_timeout_s: of.ReceiveTimeout = None,
    send_timeout_s: of.SendTimeout = None,
    request_timeout_s: of.RequestTimeout = None,
    drain_s: of.Drain = None,
    stall_s: of.Stall = None,
    api_keys: of.ApiKeys = None,
    allow_origins: of.AllowOrigins = None,
    ssl_certfile: of.SslCertfile = None,
    ssl_keyfile: of.SslKeyfile = None,
    log_level: of.LogLevel = None,
    log_json: of.LogJson = None,
    batch_dir: of.BatchDir = None,
    max_batch_dir_bytes: of.MaxBatchDirBytes = None,
    max_batch_requests: of.MaxBatchRequests = None,
    batch_concurrency: of.BatchConcurrency = None,
    batch_priority: of.BatchPriority = None,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol.

    Beside it there are /health, /metrics and a page at /. A first SIGTERM lets the requests that run end.
    """
    cluster = processes.cluster()
    given = {name: value for name, value in locals().items() if value is not None and value != []}
    # Which steps a server will run is not known: where compiling is slow, all of them come before the first request.
    engine = dataclasses.replace(of.config_of(EngineConfig, given), compile_ahead=None)
    run(model, engine, of.config_of(ServeConfig, given))


def run(model: str | None, engine: EngineConfig, config: ServeConfig) -> None:
    """Serves until a signal; the exit status is 1 where requests had to be cut.

    Raises:
        MissingExtraError: the extra `serve` is not installed.
        TurbojaxError, CheckpointError: what is wrong with the model, the address or a config.
    """
    try:
        from turbojax.serve.app import create_app
        from turbojax.serve.batches.disk import check_folder
        from turbojax.serve.server import ending_on_sigterm, listen, run_server
        from turbojax.serve.service import Service
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error
    loading = partial(serve_log.loading, config)
    with serve_log.starting(config) as tell:
        session.follow(model, engine, loading)
        # A folder or a port that is taken, or a file that is no template, is known before a model is loaded for it.
        check_folder(config.batch_dir)
        if config.chat_template is not None:
            read_chat_template(config.chat_template)
        with ending_on_sigterm(), listen(config) as listener, session.open_pipeline(model, engine, loading) as pipe:
            service = Service(pipe, config, config.model_name or default_name(model))
            app = create_app(service)
            with serve_log.serving(config):
                ready = f"'{service.model_name}' is served at"
                answered_all = run_server(app, config, listener, lambda url: tell(f"{ready} {url}/v1"))
    if not answered_all:
        raise typer.Exit(1)


def default_name(model: str | None) -> str:
    """A repository's id as it is; of a path the last part."""
    if model is None:
        return DEFAULT_FILE.split(".")[0]
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name
