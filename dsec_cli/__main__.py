"""The command ``dsec``: one file per command, imported when it is called (``dsec --help`` imports click alone)."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of signal, the part that is there already
import gc
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # During the imports Ctrl-C just ends us: there is nothing to tidy yet, and whoever pressed it wants no traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

gc.disable()  # for the imports: collecting while they make objects takes 4 to 11 ms of a start

try:
    import click
except ModuleNotFoundError:  # the distribution without extras is the SDK alone
    sys.exit("dsec: the commands need more packages: install dsec-store[node], [registry] or [all]")

from dsec_cli.output import LazyGroup, run_command  # noqa: E402

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("dsec_cli.doctor", "What this machine has, and what does not work without it."),
    "layer": ("dsec_cli.layer", "Build, list, show, push, pull and remove layers."),
    "erofs": ("dsec_cli.erofs", "Look into EROFS images."),
    "registry": ("dsec_cli.registry", "Serve layers to other machines."),
    "node": ("dsec_cli.node", "The block server of this machine."),
    "stats": ("dsec_cli.stats", "What the node fetched, layer by layer."),
    "mount": ("dsec_cli.mount", "Mount an environment."),
    "umount": ("dsec_cli.umount", "Undo a mount."),
    "run": ("dsec_cli.run", "Run a command in a new sandbox."),
    "ps": ("dsec_cli.ps", "List sandboxes."),
    "rm": ("dsec_cli.rm", "Remove sandboxes."),
    "pack-diff": ("dsec_cli.pack_diff", "Pack what a sandbox changed into a layer."),
}


@click.group(cls=LazyGroup, commands_table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsec-store", prog_name="dsec", message="%(prog)s %(version)s")
def cli() -> None:
    """Layers of files on demand, for sandboxes of every kind."""


def main() -> None:
    gc.enable()
    gc.freeze()
    run_command(cli)


if __name__ == "__main__":
    main()
