"""`turbojax serve api_server`: a model behind OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from turbojax.cli import options, session
from turbojax.cli.console import say
from turbojax.cli.serve_proxy import proxy
from turbojax.errors import MissingExtraError
from turbojax.serve.settings import DEFAULT_PORT, ServeConfig

serve = typer.Typer(name="serve", help="Serve models over HTTP.", no_args_is_help=True)
serve.command()(proxy)


@serve.command("api_server")
def api_server(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file or a Hugging Face repo id.")] = None,
    server_name: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="0 takes a free port.")] = DEFAULT_PORT,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    dtype: options.Dtype = None,
    model_format: options.ModelFormat = None,
    session_len: options.SessionLen = None,
    max_batch_size: options.MaxBatchSize = None,
    quant_policy: options.QuantPolicy = None,
    cache_max_entry_count: options.CacheMaxEntryCount = None,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol."""
    config = ServeConfig(server_name, server_port, model_name)
    engine = options.engine_config(
        dtype=dtype, model_format=model_format, session_len=session_len, max_batch_size=max_batch_size,
        quant_policy=quant_policy, cache_max_entry_count=cache_max_entry_count,
    )  # fmt: skip
    try:
        import uvicorn

        from turbojax.serve.app import create_app
        from turbojax.serve.service import Service
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is not installed: pip install 'turbojax[serve]'") from error
    with session.open_pipeline(model, engine) as pipe:
        service = Service(pipe, config, model_name or model or "SmolLM2-135M-Instruct")
        say(f"serving '{service.model_name}' at http://{server_name}:{server_port}/v1")
        uvicorn.run(create_app(service), host=server_name, port=server_port, log_level="warning")
