"""`penstock verify`: a check that an artifact still has the bytes that were compiled."""

from __future__ import annotations

from penstock.cli.terminal import console, options
from penstock.schedule.facts.sizes import format_size

EXAMPLES = ("penstock verify model.penstock",)


def verify(artifact: options.Artifact, json: options.Json = False) -> None:
    """Hash every weight byte and prove every plan of an artifact."""
    from penstock.runtime.program import open as open_program

    program = open_program(artifact)
    with console.byte_progress() as progress:
        nbytes = program.verify(progress)
    if json:
        console.print_json({"path": str(artifact), "verified_bytes": nbytes})
    else:
        console.print_text(f"{artifact}: {format_size(nbytes)} of weights are those that were compiled")
