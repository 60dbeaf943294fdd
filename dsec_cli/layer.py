"""``dsec layer``: the commands about layers."""

from __future__ import annotations

from dsec_cli.output import LazyGroup

command = LazyGroup(
    name="layer",
    help="Build, list, show, push, pull and remove layers.",
    commands_table={
        "build": ("dsec_cli.layer_build", "Build a layer of a directory or a tar."),
        "ls": ("dsec_cli.layer_ls", "List layers and environments."),
        "show": ("dsec_cli.layer_show", "Show all about a layer or an environment."),
        "push": ("dsec_cli.layer_push", "Copy a layer or an environment to a registry."),
        "pull": ("dsec_cli.layer_pull", "Copy a layer or an environment from a registry."),
        "rm": ("dsec_cli.layer_rm", "Remove references."),
    },
)
