"""``dsec doctor``: what this machine has, and what does not work without it."""

from __future__ import annotations

import sys

import click

from dsec_cli.output import print_json, print_table


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Look at the kernel, permissions and programs of this machine.

    Kernel features are tried for real, with a tiny layer in the home's file system. Exit status 0: sandboxes can be run
    here (something may still be limited); 1: something is missing that they need.
    """
    from dsec_store import doctor
    from dsec_store.home import Home

    checks = doctor.examine(Home.default())
    able = doctor.able(checks)
    if as_json:
        print_json({"able": able, "checks": [check.to_dict() for check in checks]})
    else:
        print_table(
            ["WHAT", "STATUS", "FOUND", "NEEDED FOR"],
            [[check.name, check.status, check.found, check.needed_for] for check in checks],
        )
        missing = [check.name for check in checks if check.required and check.status == doctor.MISSING]
        click.echo("\nSandboxes can be run here." if able else f"\nSandboxes cannot be run here: {', '.join(missing)}.")
    sys.exit(0 if able else 1)
