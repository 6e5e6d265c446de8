"""What calls of a capped Llama take in a memory cgroup of the libraries, the cap and 64 MiB.

A greedy call, a prompt of 900 tokens, a padded batch, beams, a chat that grows, prompts of 32 lengths, each
in a process of its own, then all in one, with cold and with warm weight files. A process whose calls take
more is killed. The tokens are compared with those of the model in memory. After each call the process says
what it still has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.calls.capped import SLACK
from examples.demo.cgroup import join_group, make_group
from penstock.runtime.system.memory import anonymous_bytes
from penstock.schedule.facts.errors import StreamError
from penstock.schedule.facts.sizes import format_size

CAP = 100_000_000
LARGE = {"layers": 16, "hidden": 1024, "vocabulary": 32000}
THREADS = 2
STATES = "cold", "warm"
LENGTHS = range(869, 901)

Call = Callable[[Any], Any]
"""Makes one call of a model; returns the tokens."""


def make_llama(folder: Path, *, layers: int, hidden: int, vocabulary: int) -> None:
    """Write a random Llama in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4},
        **{
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
        },
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _generate(model: Any, ids: Any, mask: Any = None, **options: Any) -> Any:
    import torch

    mask = torch.ones_like(ids) if mask is None else mask
    chosen = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **chosen)


def _prompt(length: int, shift: int = 0) -> Any:
    import torch

    return (torch.arange(length)[None] * 7 + shift) % 1000 + 3


def _padded(model: Any) -> Any:
    import torch

    ids, mask = torch.zeros(4, 120, dtype=torch.long), torch.zeros(4, 120, dtype=torch.long)
    for row, length in enumerate((120, 30, 75, 7)):
        ids[row, -length:], mask[row, -length:] = _prompt(length, row), 1
    return _generate(model, ids, mask)


def _chat(model: Any) -> Any:
    """Five turns, each with all that was said before, as `penstock generate --chat` sends them."""
    import torch

    said = _prompt(20)
    for turn in range(5):
        said = _generate(model, torch.cat([said, _prompt(60 * (turn + 1), turn)], 1))
    return said


def _lengths(model: Any) -> Any:
    """Prompts of different lengths, for each of which torch makes kernels of its own."""
    import torch

    made = [_generate(model, _prompt(length), max_new_tokens=1, min_new_tokens=1) for length in LENGTHS]
    return torch.stack([tokens[0, -1] for tokens in made])


CALLS: dict[str, Call] = {
    "a greedy call": lambda model: _generate(model, _prompt(12)),
    "a prompt of 900 tokens": lambda model: _generate(model, _prompt(900)),
    "a padded batch of 4": _padded,
    "4 beams": lambda model: _generate(model, _prompt(40), num_beams=4),
    "a chat of 5 turns, up to 940 tokens": _chat,
    "32 prompts of 869 to 900 tokens": _lengths,
}


@dataclass(frozen=True)
class Lived:
    """What a process left behind.

    Attributes:
        bare: The bytes of its own that it had when it had imported its libraries.
        after: The bytes of its own beyond these, after each call.
        tokens: What each call made.
        limit: The bytes of its group; 0 without one.
        peak: The most bytes that the group had, page cache included.
    """

    bare: int
    after: tuple[int, ...] = ()
    tokens: tuple[Any, ...] = ()
    limit: int = 0
    peak: int = 0


def live(folder: str, cap: int, names: Sequence[str], group: str) -> Lived:
    """Make calls of a model, one after another, capped unless `cap` is 0, in a group unless that is empty.

    The group is joined before the libraries are imported, so that it holds their memory, too.
    """
    assert "torch" not in sys.modules
    if group:
        join_group(Path(group))
    import torch
    import transformers
    from transformers import LlamaForCausalLM

    from penstock.integrations import load

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    bare, after, tokens = anonymous_bytes(), [], []
    if not names:
        return Lived(bare)
    model: Any = load(folder, cap) if cap else LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name in names:
        tokens.append(CALLS[name](model).tolist())
        after.append(anonymous_bytes() - bare)
    return Lived(bare, tuple(after), tuple(tokens))


def run_apart(folder: Path, names: Sequence[str], *, cap: int = 0, group: Path | str = "") -> Lived:
    """Run `live` in a process of its own. Raises StreamError where that dies."""
    from benchmarks import ways  # and numpy with it, which `live` must not have imported outside its group

    asked = json.dumps([str(folder), cap, list(names), str(group)])
    said = ways.run_apart(
        "benchmarks.calls.capped_calls", "--asked", asked, XDG_CACHE_HOME=str(folder / "cache")
    )
    return Lived(said["bare"], tuple(said["after"]), tuple(said["tokens"]))


def run_capped(folder: Path, names: Sequence[str], *, bare: int, cap: int) -> Lived | None:
    """Run in a group of `bare` bytes, the cap and 64 MiB; None where no group can be made."""
    with make_group(bare + cap + SLACK) as group:
        if group is None:
            return None
        lived = run_apart(folder, names, cap=cap, group=group.folder)
        return Lived(lived.bare, lived.after, lived.tokens, group.limit_bytes, group.peak_bytes)


def measure(folder: Path, cap: int) -> list[dict[str, Any]]:
    """Run each call in a process of its own, and all in one, with cold and with warm files."""
    from benchmarks.machine import drop_cache, warm_cache

    bare = run_apart(folder, ()).bare
    expected = {name: run_apart(folder, (name,)).tokens[0] for name in CALLS}
    rows = []
    for names in (*((name,) for name in CALLS), tuple(CALLS)):
        row: dict[str, Any] = {"calls": names[0] if len(names) == 1 else "all of these in one process"}
        for state, prepare in zip(STATES, (drop_cache, warm_cache), strict=True):
            prepare(folder.glob("*.safetensors"))
            try:
                lived = run_capped(folder, names, bare=bare, cap=cap)
            except StreamError as error:
                typer.echo(f"{state}: {error}")
                row[state] = None
                continue
            if lived is None:
                raise SystemExit("no memory cgroup can be made here: run as root")
            facts = asdict(lived) | {"equal": lived.tokens == tuple(expected[name] for name in names)}
            row[state] = {name: fact for name, fact in facts.items() if name != "tokens"}
            peak, after = format_size(lived.peak), format_size(max(lived.after))
            words = f"{peak} of {format_size(lived.limit)}, {after} after it, equal: {facts['equal']}"
            typer.echo(f"{row['calls']}, {state}: {words}")
        rows.append(row)
    return rows


def render(rows: Sequence[dict[str, Any]], cap: int) -> str:
    """Return a table for a page."""
    from benchmarks.machine import describe_machine

    machine, first = describe_machine(), next(row[state] for row in rows for state in STATES if row[state])
    lines = [
        f"{machine['date']}: {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{THREADS} threads. The libraries",
        f"take {first['bare'] >> 20} MiB, the cap is {cap >> 20} MiB, and the group has "
        f"{first['limit'] >> 20} MiB. MiB:",
        "",
        "| calls | the group at most, cold | warm | of its own after a call, cold | warm | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        states = [row[state] for state in STATES]
        cells = [row["calls"], *(str(state["peak"] >> 20) if state else "**killed**" for state in states)]
        cells += [str(max(state["after"]) >> 20) if state else "" for state in states]
        cells.append("equal" if all(state["equal"] for state in states if state) else "**different**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(
    *,
    cap: Annotated[int, typer.Option(help="Bytes for the model.")] = CAP,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    asked: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Make the calls in groups; ends with 1 where one is killed, or makes other tokens.

    Example: python -m benchmarks.calls.capped_calls
    """
    if asked:
        typer.echo(json.dumps(asdict(live(*json.loads(asked)))))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_llama(folder, **LARGE)
        rows = measure(folder, cap)
    if json_path:
        json_path.write_text(json.dumps({"cap": cap, "rows": rows}, indent=1) + "\n")
    typer.echo(render(rows, cap))
    raise SystemExit(not all(row[state] and row[state]["equal"] for row in rows for state in STATES))


if __name__ == "__main__":
    typer.run(main)
