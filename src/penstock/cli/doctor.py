"""`penstock doctor`: a check of which parts of a model export and stream."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock._extras import find_model
from penstock.cli.terminal import console, options

EXAMPLES = ("penstock doctor my_models:build",)


def doctor(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function that returns a module and example inputs, a config.json, or its folder.",
            callback=find_model,
        ),
    ],
    *,
    json: options.Json = False,
) -> None:
    """Say which parts of a model will export and stream, which will not, and which line prevents it."""
    from penstock.models.doctor import examine, facts

    with console.spinner(f"exporting {model} without building it"), console.quiet():
        checks = examine(model)
    if json:
        console.print_json(facts(checks))
    else:
        console.print_facts(model, [(f"{check.outcome:7} {check.name}", check.message) for check in checks])
    if any(check.outcome == "problem" for check in checks):
        raise typer.Exit(1)
