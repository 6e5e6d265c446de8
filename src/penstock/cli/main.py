"""The command line `penstock`: one application of a file for each command.

Exit status: 0 when done, 2 with one sentence on stderr for bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Annotated

import typer

from penstock.cli import (
    cache,
    compile,
    convert,
    demo,
    doctor,
    hardware,
    inspect,
    plan,
    preflight,
    relink,
    run,
    simulate,
    verify,
)
from penstock.cli.terminal.inputs import fail
from penstock.cli.terminal.interrupts import STATUS, answered
from penstock.schedule.facts.errors import PenstockError

COMMANDS = (
    preflight,
    doctor,
    convert,
    compile,
    plan,
    simulate,
    inspect,
    verify,
    relink,
    run,
    hardware,
    cache,
    demo,
)
"""In the order of `penstock --help`. Each file has a function or group of its own name, and EXAMPLES."""

app = typer.Typer(
    help="Run exported PyTorch programs whose weights are bigger than the memory they run in.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def _add(command: ModuleType) -> None:
    name = command.__name__.rpartition(".")[2]
    title = "Examples:" if len(command.EXAMPLES) > 1 else "Example:"
    examples = "\n\n".join([title, *(f"- `{one}`" for one in command.EXAMPLES)])
    made = getattr(command, name)
    if isinstance(made, typer.Typer):
        app.add_typer(made, name=name, epilog=examples)
    else:
        app.command(name, epilog=examples)(made)


for _command in COMMANDS:
    _add(_command)


def main() -> None:
    """Run the command line; every error of the tree becomes one sentence and status 2."""
    try:
        with answered():
            app(prog_name="penstock")
    except PenstockError as error:
        fail(str(error))
    except OSError as error:  # a path that the system does not look up
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        sys.exit(STATUS)


if __name__ == "__main__":
    main()
