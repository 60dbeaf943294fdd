"""``dsec erofs``: the commands about EROFS images."""

from __future__ import annotations

from dsec_cli.output import LazyGroup

command = LazyGroup(
    name="erofs",
    help="Look into EROFS images.",
    commands_table={
        "inspect": ("dsec_cli.erofs_inspect", "Show what is in a metadata image."),
    },
)
