"""Architectures chosen by a seed, tiny, through `apply`: what is equal to the bit, and what is refused.

Models of transformers and parts of pipelines of diffusers are made of their own configuration classes and
called with random inputs, then with two rows, and again. That is done at the least memory that they run in,
and with room for another 30 %, and for all, of their weights; in a contiguous arena whose free memory is
poisoned, and in the default one. Each has a process of its own, with a limit on time and memory. What is
equal to the library's model, call for call, is equal; what raises one of penstock's errors, whose sentence
docs/zoo.md lists, is refused; all else is wrong, and the exit status is 1. A model that does not run in
memory either is not counted.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.table import write_between
from benchmarks.zoo.configs import architectures, tiny_model
from benchmarks.zoo.inputs import model_generates, tiny_inputs
from benchmarks.zoo.named import OWN, TRANSFORMERS, looping_mixture, mixtures, own_inputs, own_model
from benchmarks.zoo.parts import part_inputs, parts, tiny_part
from benchmarks.zoo.visit import call, first_line, is_listed, quiet, same_bits
from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import BudgetError, PenstockError

BEGIN = "<!-- benchmarks.zoo.random_models writes from here -->"
SECONDS, MEMORY = 600, 12 << 30
"""Limits of a process: seconds, and bytes of address space that it fills."""
NEW_TOKENS = 3
LEAST, MOST_BUDGETS = 64 << 10, 12
"""The memory that is tried first, and how often an error may name more."""
ARENAS = {"poisoned": LoadOptions(arena="contiguous", poison=True), "default": LoadOptions()}

SHARES = (0.0, 0.3, 1.0)

Inputs = dict[str, torch.Tensor]
Applied = Callable[[nn.Module, int], Any]


@dataclass(frozen=True)
class Found:
    """What became of an architecture: `equal`, `refused`, `wrong`, or `not counted`, and why."""

    library: str
    name: str
    verdict: str
    why: str = ""
    seconds: float = 0.0


LIBRARIES: dict[str, tuple[Callable[[str], nn.Module], Callable[[Any], Inputs]]] = {
    "transformers": (tiny_model, tiny_inputs),
    "diffusers": (tiny_part, part_inputs),
    "mixtures": (looping_mixture, tiny_inputs),
    "own": (own_model, own_inputs),
}
"""How each library makes a model, and what it is called with."""


def names_of(library: str) -> list[str]:
    """The architectures of a library."""
    if library == "transformers":
        return list(dict.fromkeys(architectures().values()))
    return mixtures() if library == "mixtures" else parts()


def visit(library: str, name: str) -> Found:
    """Make one model, call it in memory and through `apply`, and compare."""
    make, inputs_of = LIBRARIES[library]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        try:
            model = make(name)
            given = inputs_of(model)
            reference = copy.deepcopy(model)
            calls = list(_calls(given))
            expected = [_answer(reference, one) for one in calls]
            again = [_answer(reference, one) for one in calls]
        except Exception as error:
            return Found(library, name, "not counted", first_line(error, Path(folder)))
        if not all(same_bits(*pair) for pair in zip(again, expected, strict=True)):
            return Found(library, name, "not counted", "in memory it says something else each time")
        try:
            differing = [
                f"{arena}, {share:.0%}: calls {equal}"
                for arena, options in ARENAS.items()
                for share, equal in _by_share(model, calls, expected, partial(_applied, options, folder))
                if not all(equal)
            ]
        except PenstockError as error:
            sentence = first_line(error, Path(folder))
            return Found(library, name, "refused" if is_listed(sentence) else "wrong", sentence)
        except Exception as error:
            return Found(library, name, "wrong", first_line(error, Path(folder)))
    return Found(library, name, "wrong" if differing else "equal", "; ".join(differing))


def _by_share(
    model: nn.Module, calls: Sequence[Inputs], expected: Sequence[list[torch.Tensor]], applied: Applied
) -> Iterator[tuple[float, list[bool]]]:
    """Yield which calls are equal at the floor, and with room for shares of the weights beside it.

    Each call is made twice. Where memory is too little, the error's number is taken.
    """
    weights = sum(value.nbytes for value in model.parameters())
    floor = LEAST
    for share in SHARES:
        for _ in range(MOST_BUDGETS):
            try:
                with applied(model, floor + int(share * weights)):
                    answers = [_answer(model, given) for _ in range(2) for given in calls]
                break
            except BudgetError as error:
                if not error.floor_bytes or error.floor_bytes <= floor:
                    raise
                floor = error.floor_bytes
        else:
            raise RuntimeError(
                f"{MOST_BUDGETS} errors in turn named a memory that is too small, {floor} at last"
            )
        yield share, [same_bits(*pair) for pair in zip(answers, [*expected, *expected], strict=True)]


def _applied(options: LoadOptions, folder: str, model: nn.Module, memory: int) -> Any:
    return apply(model, memory, cache=folder, options=options)


def _calls(given: Inputs) -> Iterator[Inputs]:
    """The inputs with random values, and two rows of them."""
    for rows in (1, 2):
        torch.manual_seed(rows)
        yield {name: _varied(name, one, rows) for name, one in given.items()}


def _varied(name: str, one: torch.Tensor, rows: int) -> torch.Tensor:
    repeated = one.repeat(rows, *[1] * (one.ndim - 1)) if one.ndim and one.shape[0] == 1 else one
    if (
        "mask" in name
        or "time" in name
        or name.endswith(("type_ids", "img_ids", "txt_ids"))
        or name == "bbox"
    ):
        return repeated
    return torch.randn_like(repeated) if one.is_floating_point() else repeated


def _answer(model: Any, given: Inputs) -> list[torch.Tensor]:
    torch.manual_seed(3)
    if hasattr(model, "main_input_name") and model_generates(model):
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        told = {"output_logits": True, "return_dict_in_generate": True}
        output = call(lambda **inputs: model.generate(**inputs, **options, **told), given)
    else:
        output = call(model, given)
    return output


def in_a_process(library: str, name: str) -> Found:
    """`visit` in a process of its own, which is ended where it takes too long or too much."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.zoo.random_models", "--one", library, "--name", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Found(library, name, "wrong", f"no answer in {SECONDS} s", SECONDS)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Found(library, name, "wrong", f"the process ended with {done.returncode}: {last}")
    return Found(**json.loads(lines[-1]) | {"seconds": round(time.monotonic() - began, 1)})


def sample(
    library: str, count: int, seed: int, look: Callable[[str, str], Found] = in_a_process
) -> Iterator[Found]:
    """Visit architectures in the order of a seed until as many as wanted are counted."""
    names = names_of(library)
    random.Random(seed).shuffle(names)
    for name in names:
        if count <= 0:
            return
        found = look(library, name)
        count -= found.verdict != "not counted"
        yield found


def render(found: Sequence[Found], seed: int) -> str:
    """How many are equal, and a line for each that is not."""
    counted = [one for one in found if one.verdict != "not counted"]
    libraries = list(dict.fromkeys(one.library for one in counted))
    lines = [f"Seed {seed}; {len(found) - len(counted)} more do not run in memory as they were made.", ""]
    lines += ["| library | architectures | equal | refused | wrong |", "|---|---|---|---|---|"]
    for library in libraries:
        of = Counter(one.verdict for one in counted if one.library == library)
        lines.append(f"| {library} | {of.total()} | {of['equal']} | {of['refused']} | {of['wrong']} |")
    others = [one for one in counted if one.verdict != "equal"]
    return "\n".join([*lines, "", *(f"- {one.name}, {one.verdict}: `{one.why}`" for one in others)])


def main(
    *,
    seed: Annotated[int | None, typer.Option(help="Chooses the architectures; another one each day.")] = None,
    transformers: Annotated[int, typer.Option(help="How many of transformers.")] = 60,
    diffusers: Annotated[int, typer.Option(help="How many of diffusers.")] = 20,
    named: Annotated[
        int | None, typer.Option(help="Instead, those of zoo_named.py, and so many mixtures that loop.")
    ] = None,
    docs: Annotated[Path | None, typer.Option(help="Write the table into this document.")] = None,
    one: Annotated[str, typer.Option(help="A library: visit one architecture of it in this process.")] = "",
    name: Annotated[str, typer.Option(help="The architecture to visit with --one.")] = "",
) -> None:
    """Try architectures that nobody chose: an hour.

    Example: python -m benchmarks.zoo.random_models --seed 7 --transformers 10 --diffusers 3
    """
    if one:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        typer.echo(json.dumps(asdict(visit(one, name))))
        return
    seed = int(time.time()) // 86400 if seed is None else seed
    typer.echo(f"seed {seed}", err=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if named is None:
        visits = chain(sample("transformers", transformers, seed), sample("diffusers", diffusers, seed))
    else:
        by_name = [("transformers", kind) for kind in TRANSFORMERS] + [("own", kind) for kind in OWN]
        visits = chain(starmap(in_a_process, by_name), sample("mixtures", named, seed))
    found = []
    for row in visits:
        found.append(row)
        typer.echo(f"{row.library} {row.name}: {row.verdict} {row.why} ({row.seconds} s)", err=True)
    text = render(found, seed)
    if docs:
        write_between(docs, text, BEGIN)
    typer.echo(text)
    if any(row.verdict == "wrong" for row in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
