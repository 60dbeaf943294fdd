"""``dsec registry serve``: the OCI Distribution API over the local store."""

from __future__ import annotations

import click


@click.command()
@click.option(
    "--listen", "address", default="127.0.0.1:5000", show_default=True, metavar="ADDR:PORT", help="0: any port."
)
def command(address: str) -> None:
    """Serve the store of $DSEC_HOME until SIGTERM or Ctrl-C.

    Plain HTTP and no credentials: listen on loopback, or behind a proxy that has them. Prints "listening on ADDR:PORT"
    once it answers.
    """
    from dsec_store.backends.local import LocalBackend
    from dsec_store.home import Home
    from dsec_store.registry.serve import address_of, listen, serve

    with listen(address) as sock:
        backend = LocalBackend(Home.default().ensure().store)
        text = address_of(sock)  # uvicorn closes the socket

        def ready() -> None:
            print(f"listening on {text}", flush=True)

        serve(backend, sock, ready)
