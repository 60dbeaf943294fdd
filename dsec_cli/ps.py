"""``dsec ps``: the sandboxes that run, and those that were kept."""

from __future__ import annotations

import click

from dsec_cli.output import print_json, print_table
from dsec_store.home import Home
from runtimes.sandboxes import listing, reap_stale


def _outcome(entry: dict[str, object]) -> str:
    outcome = entry["outcome"]
    if not isinstance(outcome, dict):
        return ""
    detail = outcome.get("code", outcome.get("signal", ""))
    return f"{outcome['kind']} {detail}".strip()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List sandboxes: those that run, and those that were kept (--keep)."""
    home = Home.default().ensure()
    reap_stale(home)
    entries = listing(home)
    if as_json:
        print_json(entries)
        return
    print_table(
        ("SANDBOX", "NAME", "STATE", "PID", "STARTED", "OUTCOME", "LAYERS", "COMMAND"),
        [
            (
                entry["id"],
                entry["name"] or "",
                entry["state"],
                entry["pid"] or "",
                entry["started_at"].partition(".")[0] + "Z",
                _outcome(entry),
                " ".join(entry["refs"]),
                " ".join(entry["command"])[:60],
            )
            for entry in entries
        ],
    )
