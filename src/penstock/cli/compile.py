"""`penstock compile`: makes an artifact from a saved program, or from a model that it exports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console, options
from penstock.cli.terminal.options import check_folder, fail, load_exported, pairs
from penstock.schedule.facts.sizes import format_size

if TYPE_CHECKING:
    from penstock.runtime.program import Program

EXAMPLES = (
    "penstock compile model.pt2 model.penstock --trust --weights model.safetensors --no-pack",
    "penstock compile Llama-3.2-1B/ model.penstock --tokens 128",
)

Model = Annotated[
    str,
    typer.Argument(
        help="A program saved by torch.export.save (.pt2), the folder of a transformers model, or "
        "module:function that returns a module and example inputs."
    ),
]
Weights = Annotated[
    list[Path] | None,
    typer.Option(
        help="Safetensors file, index or folder to take values from; may be given again. Default: the "
        "program's own, or those in the model's folder.",
        callback=options.check_there,
    ),
]

Lowering = Annotated[
    str,
    typer.Option(
        help="eager (the exported graph itself) or inductor (compiled with AOTInductor).",
        callback=options.check_choice("lowering", ("eager", "inductor")),
    ),
]


def compile(
    model: Model,
    output: Annotated[Path, typer.Argument(help="The artifact folder to write, NAME.penstock.")],
    *,
    weights: Weights = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="FQN=NAME: what a weight is called in the files; may be repeated."),
    ] = None,
    cast: Annotated[
        bool, typer.Option("--cast", help="Convert floating-point weights of another dtype, as torch does.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each call of a model that a folder describes.")
    ] = 1,
    pack: Annotated[bool, typer.Option(help="Copy the weights, or refer to the files in place.")] = True,
    lowering: Lowering = "eager",
    resident_below: Annotated[
        str | None,
        typer.Option(
            help="With inductor: weights smaller than this stay in memory (64KiB).",
            callback=options.check_size("--resident-below", share=False),
        ),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Plan for some budgets now, for programs without Python.")
    ] = False,
    force: options.Force = False,
    trust: options.Trust = False,
    json: options.Json = False,
) -> None:
    """Compile an exported program into an artifact that streams its weights."""
    check_folder(output, force=force)
    renamed = dict(pairs(rename or [], "--rename", "FQN=NAME"))
    program, files, names = _program(model, tokens, weights or None, trust=trust)
    from penstock.runtime.artifact import compile as compile_program

    with console.byte_progress(f"compiling {model}") as progress:
        compiled = compile_program(
            program,
            output,
            weights=files,
            rename=names | renamed,
            lowering=lowering,
            cast=cast,
            pack=pack,
            resident_below=resident_below,
            force=force,
            progress=progress,
            ladder=ladder,
        )
    rungs = tuple(plan.budget for plan in compiled.payload.plans)
    facts: dict[str, object] = {"path": str(output), "digest": compiled.digest}
    facts |= {"weight_bytes": compiled.weight_bytes, "floor_bytes": compiled.floor_bytes}
    if json:
        console.print_json({**facts, "ladder": rungs} if ladder else facts)
    else:
        _print(output, compiled, rungs)


def _print(output: Path, compiled: Program, rungs: tuple[int, ...]) -> None:
    facts = [
        ("weights", format_size(compiled.weight_bytes)),
        ("floor", f"{format_size(compiled.floor_bytes)} ({compiled.floor_bytes} bytes)"),
        ("digest", compiled.digest),
        ("plans for", ", ".join(map(format_size, rungs))),
        ("next", f"penstock run {output} --budget 50%"),
    ]
    console.print_facts(f"Wrote {output}", [fact for fact in facts if fact[1]])


def _program(model: str, tokens: int, files: Any, *, trust: bool) -> tuple[Any, Any, dict[str, Any]]:
    """The program to compile, files to take values from, and names in them; `trust` loads a saved program."""
    path = Path(model)
    folder = path if path.is_dir() else path.parent if path.name == "config.json" else None
    if folder is None and (path.exists() or ":" not in model):
        return load_exported(path, trust=trust), files, {}
    if (path / "payload.json").is_file():
        fail(f"{model} is an artifact already: `penstock run {model} --budget 50%` runs it")
    from penstock.models.configuration import names_in_checkpoint
    from penstock.models.preflight import open_source
    from penstock.passes.building.fake_export import Built
    from penstock.runtime.checkpoint.opening import open_checkpoint

    with console.spinner(f"exporting {model} without building it"), console.quiet():
        build, inputs = open_source(model, tokens=tokens)
        built = Built.by(build)
        program, files = built.export(inputs()), files or folder
    names = names_in_checkpoint(built.module, open_checkpoint(files).tensors) if files else {}
    return program, files, names
