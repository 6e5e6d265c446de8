"""`penstock generate`: text of a language model in bounded memory, token by token."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock._extras import is_hub_name, is_pipeline, local_folder, require
from penstock.cli.terminal import console, options
from penstock.cli.terminal.console import left_to_body
from penstock.cli.terminal.options import fail, first_line
from penstock.schedule.facts.errors import BudgetError, PassError, PenstockError, SourceError
from penstock.schedule.facts.sizes import format_budget, format_size

if TYPE_CHECKING:
    import torch


EXAMPLES = (
    "penstock generate Qwen/Qwen3-8B --memory 8GB --prompt 'Once upon a time'",
    "penstock generate Qwen/Qwen3-8B --memory 50% --chat",
    "penstock generate Qwen/Qwen3-8B --memory 8GB --prompt 'Once upon a time' --assistant Qwen/Qwen3-0.6B",
    "penstock generate my-model/ --prompt 'Once upon a time' --lookup 4 --max-new-tokens 32 --json",
)

_DOWNLOADED = ("model.safetensors", "model-*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""What loading a model of the hub and its tokenizer may read. Folders there have it in other formats."""

_NO_FASTER = 1.02
"""A plan that is faster by at most this factor is called no faster."""

_LIMITS = {
    "compute": "computing limits it",
    "memory": "memory limits it: there is too little to read ahead",
    "units": "reading the rows or experts that tokens ask for limits it",
}
"""What limits the rate, in words."""


_Model = Annotated[
    str,
    typer.Argument(
        help="The folder of a language model, or its name on the hub, from where it is downloaded if the "
        "local cache does not have it.",
        show_default=False,
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        help="For weights, activations and caches together: 8GB, or 50% of the weights. Default: what is "
        "free, less a reserve.",
        callback=options.check_size("--memory"),
    ),
]
_Prompt = Annotated[str | None, typer.Option(help="The text to go on from; with --chat, the first message.")]
_Chat = Annotated[
    bool, typer.Option("--chat", help="A conversation, by the model's chat template: each line is a message.")
]
_Assistant = Annotated[
    str | None,
    typer.Option(
        help="A small model that proposes tokens, so that weights are read once for several. It stays in "
        "memory, and counts."
    ),
]
_Lookup = Annotated[
    int | None,
    typer.Option(min=1, help="Propose so many tokens at once from the text so far, where it repeats itself."),
]
_MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")]
_Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Seed, for models whose configuration says to sample.")
]
_Verbose = Annotated[bool, typer.Option("--verbose", help="Print what is planned and written.")]


def generate(
    model: _Model,
    *,
    memory: _Memory = None,
    prompt: _Prompt = None,
    chat: _Chat = False,
    assistant: _Assistant = None,
    lookup: _Lookup = None,
    max_new_tokens: _MaxNewTokens = 256,
    seed: _Seed = 0,
    verbose: _Verbose = False,
    json: options.Json = False,
) -> None:
    """Print what a language model says, token by token, within a cap of memory.

    The last line, on stderr, has tokens a second, the bytes of weights that were read, the peak of memory,
    what limited the rate, and what twice the memory would give. In a chat, Ctrl-D ends; Ctrl-C stops an
    answer, and pressed twice it ends.
    """
    if prompt is None and not chat:
        fail("there is nothing to say: give --prompt TEXT, or --chat for a conversation")
    if chat and json:
        fail("--json prints one answer and --chat makes several: leave one of them out")
    if assistant and lookup:
        fail("--assistant and --lookup both propose tokens: leave one of them out")
    require("transformers", purpose="penstock generate")
    with console.spinner(f"finding {model}"):
        folder = find_folder(model)
        helper = find_folder(assistant) if assistant else None
    with console.spinner("importing"), console.quiet():
        import torch
        import transformers.modeling_utils  # which has libraries complain as they are imported

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with console.spinner(f"reading {model}"):
        tokenizer = read_tokenizer(folder, chat=chat)
    session = _Session(folder, tokenizer, memory, verbose=verbose, shows=not json)
    session.limits |= {"max_new_tokens": max_new_tokens, "prompt_lookup_num_tokens": lookup}
    if helper:
        session.assist(helper)
    torch.manual_seed(seed)
    if chat:
        for words in () if verbose else session.applied.contexts:
            typer.echo(f"penstock: {words}", err=True)
        _converse(session, prompt)
        return
    answer = session.answer(tokenizer(prompt, return_tensors="pt"), session.stream())
    if json:
        console.print_json(answer.facts())
    else:
        typer.echo(answer.summary(), err=True)


# Where the model is.


def find_folder(source: str) -> Path:
    """The folder of a model, downloaded if no local cache has it. Raises SourceError without a model."""
    from huggingface_hub import constants

    can_download = is_hub_name(source) and not Path(source).exists() and not constants.HF_HUB_OFFLINE
    try:
        folder = local_folder(source)
    except SourceError:
        if can_download:
            return _download(source)
        raise
    # The cache may have the configuration alone, or the tokenizer.
    if can_download and not any(folder.glob("*.safetensors")):
        folder = _download(source)
    if is_pipeline(folder):
        raise SourceError(
            f"{folder} holds a pipeline of diffusers, which makes no text: give a language model"
        )
    return folder


def _download(name: str) -> Path:
    """Download a model from the hub, after a line that says how many bytes it has. Raises SourceError."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        stored = HfApi().model_info(name, files_metadata=True).siblings or []
        top = [file for file in stored if "/" not in file.rfilename]
        files = [file for file in top if any(fnmatchcase(file.rfilename, form) for form in _DOWNLOADED)]
        if not any(file.rfilename.endswith(".safetensors") for file in files):
            raise SourceError(f"{name} has no model.safetensors on the hub: choose a model that has one")
        nbytes = sum(file.size or 0 for file in files)
        typer.echo(f"penstock: downloading {nbytes:,} bytes ({format_size(nbytes)}) of {name}", err=True)
        return Path(snapshot_download(name, allow_patterns=[file.rfilename for file in files]))
    except PenstockError:
        raise
    except Exception as error:  # of the hub, of its library, and of the network below it
        raise SourceError(
            f"{name!r} is neither a folder nor a model in the local cache, and cannot be downloaded now "
            f"({first_line(error)}): download it with `hf download {name}`"
        ) from error


def read_tokenizer(folder: Path, *, chat: bool) -> Any:
    """A folder's tokenizer, without its own code. Raises SourceError without one, or one that can `chat`."""
    from transformers import AutoTokenizer

    from penstock.models.configuration import read_config

    read_config(folder)  # which the tokenizer depends on
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = shorten(str(error), 300, placeholder=" ...")
        raise SourceError(
            f"{folder} has no tokenizer that transformers can read ({reason}): put intact copies of "
            "tokenizer.json and tokenizer_config.json beside its weights"
        ) from error
    if chat and not tokenizer.chat_template:
        raise SourceError(
            f"{folder} has no chat template: give a model that was trained to chat, or leave --chat out"
        )
    return tokenizer


# What it says.


@dataclass(frozen=True)
class Answer:
    """What a model said to one prompt, and what that took.

    Attributes:
        text: What it said, without special tokens.
        token_ids: The numbers of its tokens.
        prompt_tokens: How many tokens the prompt has.
        seconds_to_first_token: Seconds until the first tokens.
        tokens_per_second: The rate after the first two calls, which measure and plan, or after the first one
            where there are no more; None for one call.
        bytes_read: Bytes of weights that came into memory, from the disk or the page cache.
        peak_bytes: The most memory that the process had so far; 0 where the system does not say.
        library_bytes: The same when no weight had been in memory yet.
        memory: The cap.
        limit: What limited the rate, in words.
        tokens_per_second_with_twice_the_memory: As far as plans predict; None where nobody knows.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    seconds_to_first_token: float
    tokens_per_second: float | None
    bytes_read: int
    peak_bytes: int
    library_bytes: int
    memory: int
    limit: str
    tokens_per_second_with_twice_the_memory: float | None

    def facts(self) -> dict[str, Any]:
        """The answer as JSON."""
        return {"tokens": len(self.token_ids), **asdict(self)}

    def summary(self) -> str:
        """One line about what the answer took."""
        count, rate = len(self.token_ids), self.tokens_per_second
        twice = self.tokens_per_second_with_twice_the_memory
        parts = [f"{count} token{'s' * (count != 1)}" + (f", {_number(rate)} a second" if rate else "")]
        parts.append(f"read {format_size(self.bytes_read)} of weights within {format_budget(self.memory)}")
        if self.peak_bytes:
            libraries = format_size(self.library_bytes)
            parts.append(
                f"peak memory {format_size(self.peak_bytes)}, {libraries} of it Python and libraries"
            )
        parts.append(self.limit)
        if rate and twice:
            gives = f"about {_number(twice)} a second" if twice > _NO_FASTER * rate else "no more"
            parts.append(f"twice the memory would give {gives}")
        return "; ".join(parts)


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


class _Stream:
    """Hands tokens to a streamer of transformers, and notes when they came. The first are the prompt's."""

    def __init__(self, shown: Any) -> None:
        self._shown, self._begun = shown, False
        self.tokens: list[int] = []
        self.times: list[tuple[float, int]] = []  # of each call: when it ended, and the tokens so far

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self.tokens += value.flatten().tolist()
            self.times.append((time.perf_counter(), len(self.tokens)))
        self._begun = True
        if self._shown is not None:
            self._shown.put(value)

    def end(self) -> None:
        if self._shown is not None:
            self._shown.end()


class _Session:
    """A loaded model and its tokenizer. `limits` are options of its `generate`."""

    def __init__(
        self, folder: Path, tokenizer: Any, memory: str | None, *, verbose: bool, shows: bool
    ) -> None:
        from transformers import PreTrainedModel

        from penstock.integrations import load
        from penstock.integrations.called.measuring import highest_resident
        from penstock.integrations.cap import default_memory

        nbytes: Any = memory
        if memory is None:
            nbytes, words = default_memory()
            typer.echo(f"penstock: {words}", err=True)
        self.tokenizer, self.limits, self._shows = tokenizer, dict[str, Any](), shows
        with console.spinner(f"loading {folder}"):
            self._model = load(folder, nbytes, verbose=verbose)
        if not isinstance(self._model, PreTrainedModel) or not self._model.can_generate():
            raise PassError(f"{folder} holds a {type(self._model).__name__}, which generates no text")
        self._before = highest_resident()
        self.applied = self._model.penstock_applied
        (self._component,) = self.applied.components.values()

    def assist(self, folder: Path) -> None:
        """Let the model in a folder propose tokens; it counts in the memory. Raises BudgetError."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with console.spinner(f"loading {folder}"):
            helper = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
        nbytes = sum(weight.nbytes for weight in helper.parameters())
        if nbytes >= self.applied.memory:
            raise BudgetError(
                f"the assistant takes {format_size(nbytes)} of {format_budget(self.applied.memory)}: choose "
                "a smaller one, or give more with --memory"
            )
        self.applied.cap.reserved += nbytes
        self.limits["assistant_model"] = helper
        with suppress(Exception):  # without a tokenizer of its own it has that of the model
            other = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if other.get_vocab() != self.tokenizer.get_vocab():
                self.limits |= {"tokenizer": self.tokenizer, "assistant_tokenizer": other}

    def encode(self, messages: Sequence[dict[str, str]]) -> Any:
        """Return a conversation as the model's template has it. Raises SourceError if that refuses it."""
        form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        try:
            return self.tokenizer.apply_chat_template(list(messages), **form)
        except Exception as error:  # what the template raises
            raise SourceError(f"the chat template refuses the conversation: {first_line(error)}") from error

    def stream(self) -> _Stream:
        from transformers import TextStreamer

        shown = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return _Stream(shown if self._shows else None)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def answer(self, inputs: Any, stream: _Stream) -> Answer:
        """Generate from the tokens of a prompt into `stream`. Raises PassError where transformers refuses."""
        ids = inputs["input_ids"]
        if not ids.shape[1]:
            fail("the prompt has no tokens: give --prompt some text")
        prompt = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        beams = (self._model.generation_config.num_beams or 1) > 1
        read, begun = self.applied.bytes_read, time.perf_counter()
        try:
            tokens = self._model.generate(**prompt, **self.limits, streamer=None if beams else stream)
        except ValueError as error:
            raise PassError(
                f"transformers cannot generate with these options: {first_line(error)}"
            ) from error
        except IndexError as error:
            raise PassError(
                f"the text needs more positions or tokens than the model has ({first_line(error)}): lower "
                "--max-new-tokens, or correct the tokenizer"
            ) from error
        if beams:  # known only now
            stream.put(ids)
            stream.put(tokens[0, 1 if self._model.config.is_encoder_decoder else ids.shape[1] :])
            stream.end()
        return self._measured(stream, ids.shape[1], begun, read)

    def _measured(self, stream: _Stream, prompt_tokens: int, begun: float, read: int) -> Answer:
        from penstock.integrations.called.measuring import highest_resident

        times = stream.times[1:] if len(stream.times) > 2 else stream.times
        (first, at_first), (last, at_last) = times[0], times[-1]
        calls = len(times) - 1
        seconds, each = (last - first) / max(1, at_last - at_first), (at_last - at_first) / max(1, calls)
        limit, with_twice = self._outlook(seconds, each) if calls else ("only one call was made", None)
        return Answer(
            self.text(stream.tokens),
            tuple(stream.tokens),
            prompt_tokens,
            stream.times[0][0] - begun,
            1 / seconds if calls else None,
            self.applied.bytes_read - read,
            highest_resident(),
            self._before,
            self.applied.memory,
            limit,
            with_twice,
        )

    def _outlook(self, seconds: float, each: float) -> tuple[str, float | None]:
        """Return what limits the rate, and the rate with twice the memory, as plans predict it.

        A token took `seconds`, and a call made `each` of them. What the plan does not predict, such as the
        time of an assistant, stays as it was measured.
        """
        from penstock.schedule.report.verdict import limit_of

        memory = self.applied.memory
        present, twice = self._plan(memory), self._plan(2 * memory)
        if present is None or twice is None:
            return "memory limits it: one module fits at a time", None
        if not present.streamed_bytes and present.pool is None:
            return "all weights fit, so computing limits it, and more memory would give nothing", None
        # Of two plans one may be an earlier process's, in which computing took another time.
        waits, fewer = (plan.expected_ns(0) - plan.traces[0].compute_ns for plan in (present, twice))
        now = present.expected_ns(0)
        streamed = min(seconds, now / 1e9 / each)  # of the seconds, those that the plan foresees
        felt = streamed * waits / now > seconds * (_NO_FASTER - 1)
        reading = f"reading weights limits it, at {present.hardware.link_bytes_per_s / 1e9:.3g} GB/s"
        limit = _LIMITS.get(limit_of(present) if felt else "compute", reading)
        return limit, 1 / (seconds - streamed * max(0, waits - fewer) / now)

    def _plan(self, memory: int) -> Any:
        """Return the plan for calls like the last one; None where none fits."""
        try:
            return self._component.planned_within(memory)
        except BudgetError:
            return None


def _converse(session: _Session, first: str | None) -> None:
    """Answer each line of stdin until it ends. Ctrl-C stops an answer; without an answer since, it ends."""
    messages: list[dict[str, str]] = []
    stopped = False
    with left_to_body():
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "") if first is None else first
            except EOFError:
                if sys.stdin.isatty():
                    typer.echo()  # a shell's prompt has a line of its own
                return
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                typer.echo("\npenstock: Ctrl-C again ends, and so does Ctrl-D", err=True)
                continue
            first = None
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            stream = session.stream()
            try:
                typer.echo(session.answer(session.encode(messages), stream).summary(), err=True)
                stopped = False
            except KeyboardInterrupt:
                stream.end()
                stopped = True
            messages.append({"role": "assistant", "content": session.text(stream.tokens)})
