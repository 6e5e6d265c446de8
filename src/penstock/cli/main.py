"""The command line `penstock`, assembled from one file for each command.

The exit status is 0 on success, 2 with one sentence on stderr for bad input, and 130 after Ctrl-C. Little is
imported before Ctrl-C is answered: the commands and all that they need come after.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from penstock.cli.terminal.console import STATUS, answered
from penstock.schedule.facts.errors import PenstockError

if TYPE_CHECKING:
    import typer

COMMANDS = (
    "generate",
    "preflight",
    "doctor",
    "convert",
    "compile",
    "plan",
    "simulate",
    "replay",
    "inspect",
    "verify",
    "relink",
    "run",
    "machine.hardware",
    "machine.cache",
)
"""The files of the commands below this folder, in the order of `penstock --help`.

Each has a function or a group of commands of its own name, and EXAMPLES.
"""


def assemble() -> typer.Typer:
    """Import every command, and put them together."""
    import typer

    app = typer.Typer(
        help="Run exported PyTorch programs whose weights are bigger than the memory they run in.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )

    def root(version: bool = False) -> None:
        if version:
            from penstock import __version__

            typer.echo(f"penstock {__version__}")
            raise typer.Exit

    root.__annotations__["version"] = Annotated[bool, typer.Option("--version", help="Print the version.")]
    app.callback(invoke_without_command=True)(root)
    for path in COMMANDS:
        _add(app, path)
    return app


def _add(app: typer.Typer, path: str) -> None:
    import typer

    command, name = import_module(f"penstock.cli.{path}"), path.rpartition(".")[2]
    title = "Examples:" if len(command.EXAMPLES) > 1 else "Example:"
    examples = "\n\n".join([title, *(f"- `{example}`" for example in command.EXAMPLES)])
    function = getattr(command, name)
    if isinstance(function, typer.Typer):
        app.add_typer(function, name=name, epilog=examples)
    else:
        app.command(name, epilog=examples)(function)


def main() -> None:
    """Run the command line; every PenstockError becomes one sentence on stderr and status 2."""
    # All that torch keeps is looked through for garbage a tenth as often: a fifth of a short run was that.
    gc.set_threshold(700, 10, 100)
    try:
        with answered():
            assemble()(prog_name="penstock")
    except PenstockError as error:
        sentence = str(error)
    except OSError as error:  # the system refuses a path
        sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        sys.exit(STATUS)
    else:
        return
    from penstock.cli.terminal.options import fail

    fail(sentence)
