"""``atorch-ns engine``: a coordinator of its own, for many jobs."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Serve searches for many jobs, and remember their results.", no_args_is_help=True)


@app.callback()
def _engine_group() -> None:
    """Keeps ``serve`` a subcommand while it is the only one."""


@app.command()
def serve(
    history_dir: Path = typer.Option(  # noqa: B008  # how typer declares options
        ..., help="Folder for the trials of all jobs, and for unfinished jobs. Created if missing."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; by default only for this machine."),
    port: int = typer.Option(
        0,
        min=0,
        max=65535,
        help="Port to listen on. 0 takes the last one used with this folder, or any free one.",
    ),
    token_file: Path | None = typer.Option(  # noqa: B008
        None,
        help="File with the token that jobs must present. Default: one is created in the history folder.",
    ),
    tls_cert: Path | None = typer.Option(None, help="Certificate with its chain, PEM."),  # noqa: B008
    tls_key: Path | None = typer.Option(None, help="Private key of the certificate, PEM."),  # noqa: B008
    allow_plain_remote: bool = typer.Option(
        False,
        "--allow-plain-remote",
        help="Let other machines connect without TLS. For trusted networks only.",
    ),
) -> None:
    """Serve searches until SIGINT or SIGTERM. After a restart on the same folder, unfinished searches continue.

    Prints the address on stdout once it listens; all else goes to stderr.

    Example: atorch-ns engine serve --history-dir searches
    """
    import logging

    from atorch_ns.engine.rpc.server import serve_engine, tls_files

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    serve_engine(
        history_dir,
        host=host,
        port=port,
        token_file=token_file,
        tls=tls_files(tls_cert, tls_key),
        allow_plain_remote=allow_plain_remote,
        announce=typer.echo,
    )
