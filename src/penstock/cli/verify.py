"""`penstock verify`: a check that an artifact still has the bytes that were compiled."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import console, options
from penstock.schedule.facts.sizes import format_size

EXAMPLES = ("penstock verify model.penstock", "penstock verify model.penstock --strict")


def verify(
    artifact: options.Artifact,
    *,
    strict: Annotated[
        bool, typer.Option("--strict", help="Account for every byte of the folder, and for the stored code.")
    ] = False,
    digest: options.Digest = None,
    trust: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Hash every weight byte and prove every plan of an artifact."""
    from penstock.runtime.program import read_program

    program = read_program(artifact, trust=trust)
    with console.byte_progress(f"verifying {artifact}") as progress:
        nbytes = program.verify(progress, strict=strict or digest is not None, digest=digest)
    if json:
        facts = {"path": str(artifact), "verified_bytes": nbytes, "digest": program.digest}
        console.print_json(facts)
    else:
        console.print_text(f"{artifact}: {format_size(nbytes)} of weights are those that were compiled")
        console.print_text(f"digest {program.digest}")
