"""`penstock generate` says what the library says of the same model in memory, and what that took."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaForCausalLM

import penstock.integrations
from penstock.integrations import cap
from penstock.integrations.called.component import CalledModule
from penstock.runtime.system.limits import Limit
from tests import speaking_models
from tests.cli.test_interrupts import interrupted
from tests.integrations.conftest import uncounted  # noqa: F401
from tests.integrations.models import llama
from tests.speaking_models import PROMPT, save_model

WEIGHTS = 854_272
"""Bytes of the weights of the model in `folder`, which is not tied."""

SUMMARY = re.compile(
    r"(\d+) tokens, [\d.,]+ a second; read [\d.]+ .?i?B of weights within .*; peak memory .* of it Python "
    r"and libraries; (.*)\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model that proposes tokens, and cannot chat."""
    folder = tmp_path_factory.mktemp("models") / "small"
    save_model(folder, layers=1, template=None)
    return folder


@pytest.fixture
def loaded(monkeypatch):
    """The models that the command has loaded."""
    models = []

    def load(*args, **kwargs):
        models.append(real(*args, **kwargs))
        return models[-1]

    real = penstock.integrations.load
    monkeypatch.setattr(penstock.integrations, "load", load)
    return models


def expected(folder, prompt=PROMPT, seed=0, tokens=8):
    """What the library's model says that is in memory."""
    model = LlamaForCausalLM.from_pretrained(folder)
    inputs = speaking_models.tokenizer()(prompt, return_tensors="pt")
    torch.manual_seed(seed)
    made = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=tokens)
    return made[0, inputs["input_ids"].shape[1] :].tolist()


def words(tokens):
    return " ".join(speaking_models.WORDS[number] for number in tokens)


def test_it_says_what_the_model_says_in_memory(folder, penstock):
    done = penstock("generate", folder, "--memory", "50%", "--prompt", PROMPT, "--max-new-tokens", 8)
    assert (done.status, done.out) == (0, words(expected(folder)) + "\n")
    summary = SUMMARY.fullmatch(done.err)
    assert summary, done.err
    assert summary[1] == "8"
    assert "twice the memory would give" in summary[2]


def test_it_draws_what_the_model_draws_in_memory(tmp_path, penstock):
    save_model(tmp_path, layers=1, do_sample=True, temperature=2.0)
    said = []
    for seed in (0, 5):
        done = penstock(
            *("generate", tmp_path, "--memory", "60%", "--prompt", PROMPT, "--max-new-tokens", 8),
            *("--seed", seed),
        )
        said.append(done.out)
        assert done.out == words(expected(tmp_path, seed=seed)) + "\n"
    assert said[0] != said[1]


@pytest.mark.parametrize("way", ["assistant", "lookup"])
def test_tokens_that_are_proposed_change_nothing(way, folder, small, penstock):
    value = small if way == "assistant" else 3
    done = penstock(
        *("generate", folder, "--memory", "900KB", "--prompt", PROMPT, "--max-new-tokens", 24),
        *(f"--{way}", value),
    )
    assert (done.status, done.out) == (0, words(expected(folder, tokens=24)) + "\n")


def test_an_assistant_that_leaves_no_memory_is_refused(folder, small, penstock):
    arguments = ("--memory", "300KB", "--prompt", PROMPT, "--assistant", small)
    done = penstock("generate", folder, *arguments)
    assert (done.status, done.out) == (2, "")
    assert "the assistant takes" in done.err


def test_json_has_the_counts_of_the_runtime(folder, penstock, loaded):
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    for memory in ("50%", "200MB"):
        done = penstock(*arguments, "--memory", memory)
        facts = json.loads(done.out)
        assert done.err == ""
        assert facts["token_ids"] == expected(folder)
        assert facts["text"] == words(facts["token_ids"])
        assert (facts["tokens"], facts["prompt_tokens"]) == (8, 4)
        applied = loaded[-1].penstock_applied
        assert facts["bytes_read"] == applied.bytes_read
        assert facts["memory"] == applied.memory
        assert facts["bytes_read"] > WEIGHTS  # the first call reads every weight once
        assert facts["tokens_per_second"] > 0
        assert facts["seconds_to_first_token"] > 0
        assert facts["peak_bytes"] >= facts["library_bytes"] > WEIGHTS
    assert facts["bytes_read"] == 2 * WEIGHTS  # the second call loads everything for good
    assert "all weights fit" in facts["limit"]
    assert facts["tokens_per_second_with_twice_the_memory"] is None


@pytest.mark.parametrize("computes", [0, 1])
def test_twice_the_memory_gives_what_plans_predict(folder, penstock, monkeypatch, computes):
    """Also where the second plan is one of a process in which computing took no time."""
    plans = {}

    def planned_within(component, memory):
        plan = real(component, memory)
        plans[memory] = plan
        if len(plans) == 1 or computes:
            return plan
        (trace,), (schedule,) = plan.traces, plan.schedules
        steps = tuple(replace(step, lead_ns=0, read_ns=0) for step in trace.steps)
        schedule = replace(schedule, predicted_ns=schedule.predicted_ns - trace.compute_ns)
        trace = replace(trace, steps=steps, tail_ns=0, gap_ns=0)
        return replace(plan, traces=(trace,), schedules=(schedule,))

    real = CalledModule.planned_within
    monkeypatch.setattr(CalledModule, "planned_within", planned_within)
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--memory", "50%", "--json")
    facts = json.loads(penstock(*arguments).out)
    assert list(plans) == [facts["memory"], 2 * facts["memory"]]
    now, twice = plans.values()
    assert now.streamed_bytes > twice.streamed_bytes
    # What the plan saves of its own time is saved of the measured time, of which it may predict more or less.
    measured, predicted = 1 / facts["tokens_per_second"], now.expected_ns(0) / 1e9
    (waits, fewer) = (plan.expected_ns(0) - plan.traces[0].compute_ns for plan in (now, twice))
    share = max(0.0, waits - fewer) / now.expected_ns(0)
    seconds = measured - min(measured, predicted) * share
    assert facts["tokens_per_second_with_twice_the_memory"] == pytest.approx(1 / seconds)


def test_time_that_no_plan_foresees_is_computing(folder, penstock, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter(range(0, 9999, 10)).__next__)
    monkeypatch.setattr("penstock.cli.generate.time", clock)
    monkeypatch.setattr("penstock.schedule.report.verdict.limit_of", lambda plan: "memory")
    done = penstock("generate", folder, "--memory", "50%", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert done.err.endswith("; computing limits it; twice the memory would give no more\n")


def test_one_token_is_one_call_without_a_plan(folder, penstock):
    done = penstock("generate", folder, "--memory", "50%", "--prompt", PROMPT, "--max-new-tokens", 1)
    assert done.out == words(expected(folder, tokens=1)) + "\n"
    assert done.err.startswith("1 token; read 834.25 KiB of weights within 417.12 KiB; ")
    assert done.err.endswith("; only one call was made\n")


def test_torch_keeps_few_kernels_unless_the_environment_says_otherwise(folder, penstock, monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # so that it comes back
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    assert penstock("generate", folder, "--memory", "50%", "--prompt", PROMPT, "--max-new-tokens", 1).out
    kept = (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
    assert kept == ("7", "32")


def test_beams_are_shown_when_they_are_done(tmp_path, penstock):
    save_model(tmp_path, layers=1, num_beams=3)
    done = penstock("generate", tmp_path, "--memory", "2MB", "--prompt", PROMPT, "--max-new-tokens", 8)
    assert (done.status, done.out) == (0, words(expected(tmp_path)) + "\n")


# Conversations.


def by_hand(folder, *lines):
    """The answers to lines, by the template, in memory."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), speaking_models.tokenizer()
    messages = []
    for line in lines:
        messages.append({"role": "user", "content": line})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)[0, ids.shape[1] :]
        messages.append({"role": "assistant", "content": words(made.tolist())})
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("prompt", [(), ("--prompt", "lado mibe", "--verbose")])
def test_a_conversation_is_the_templates(prompt, folder, penstock, monkeypatch):
    typed = "\nkoga neda\n" if prompt else "lado mibe\n\nkoga neda\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    done = penstock("generate", folder, "--memory", "2MB", "--chat", *prompt, "--max-new-tokens", 6)
    assert (done.status, done.out.splitlines()) == (0, by_hand(folder, "lado mibe", "koga neda"))
    assert len(SUMMARY.findall(done.err)) == 2
    assert len(re.findall(r"^penstock: a context of about [\d,]+ tokens fits .*cache$", done.err, re.M)) == 1


def test_a_conversation_at_a_terminal_leaves_a_line_of_its_own_to_the_shell(folder, penstock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert penstock("generate", folder, "--memory", "2MB", "--chat").out == "> \n"


def test_a_conversation_that_the_template_refuses_is_one_sentence(tmp_path, penstock):
    save_model(tmp_path, layers=1, template="{{ raise_exception('no more than nothing') }}")
    done = penstock("generate", tmp_path, "--memory", "2MB", "--chat", "--prompt", "lado")
    assert (done.status, done.out) == (2, "")
    *_, last = done.err.splitlines()
    assert last == "penstock: the chat template refuses the conversation: no more than nothing"


# Ctrl-C, in real processes.


@pytest.mark.nightly
def test_ctrl_c_ends_with_130_and_no_trace(folder):
    arguments = ("generate", str(folder), "--memory", "50%", "--prompt", PROMPT, "--json")
    place = "penstock.cli.generate._Session.answer"
    _, _, said = interrupted(folder, place, *arguments, "--max-new-tokens", "1000000")
    assert said == "penstock: stopping ...\n"


def test_ctrl_c_stops_an_answer_and_twice_the_conversation(folder):
    command = [sys.executable, "-m", "penstock", "generate", str(folder), "--memory", "50%", "--chat"]
    command += ["--max-new-tokens", "1000000"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("lado mibe\n", "koga\n"):
            process.stdin.write(line)
            process.stdin.flush()
            first = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            assert set((first + process.stdout.readline()).split()) <= set(speaking_models.WORDS)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    assert (process.returncode, rest) == (130, "")
    assert re.fullmatch(r"penstock: a context of about \d+ tokens fits .*\n", errors)


# What is refused, and what is found out.


def test_memory_that_is_too_small_names_what_would_do(folder, penstock):
    arguments = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 8, "--memory")
    done = penstock(*arguments, "20KB")
    least = re.search(r"give at least ([\d.]+ KiB)", done.err)
    assert (done.status, done.out, done.err.count("\n"), " 0 B " in done.err) == (2, "", 1, False)
    assert least, done.err
    again = penstock(*arguments, least[1])
    assert (again.status, again.out) == (0, words(expected(folder)) + "\n")
    assert again.err.endswith("; memory limits it: one module fits at a time\n")


@pytest.mark.parametrize("memory", ["0%", "8XB"])
def test_memory_that_is_no_size_is_refused(memory, folder, penstock):
    done = penstock("generate", folder, f"--memory={memory}", "--prompt", PROMPT)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"penstock: --memory '{memory}' ")


def test_the_default_memory_is_said(folder, penstock, monkeypatch):
    monkeypatch.setattr(cap, "memory_limit", lambda: Limit(1 << 30, "control group /small"))
    done = penstock("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 2)
    line = "penstock: memory is 819.20 MiB: control group /small has 1.00 GiB left, of which 204.80 MiB are"
    assert done.err.splitlines()[0] == f"{line} a reserve"
    assert done.out == words(expected(folder, tokens=2)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--chat", "--json"), "--json prints one answer and --chat makes several: leave one of them out"),
        (
            ("--prompt", "a", "--assistant", "b", "--lookup", "2"),
            "--assistant and --lookup both propose tokens: leave one of them out",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, sentence, penstock):
    done = penstock("generate", "anywhere", *arguments)
    assert (done.status, done.out, done.err) == (2, "", f"penstock: {sentence}\n")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            r"has no tokenizer .* one of: \(1\) a .*\): put intact copies",
        ),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "is no configuration that transformers knows: .* is not a valid JSON file",
        ),
        (
            lambda folder: (folder / "config.json").unlink(),
            "holds a tokenizer and no model: give the folder that has config.json",
        ),
        (
            lambda folder: llama(vocab_size=9).save_pretrained(folder),
            r"|penstock: the text needs more positions or tokens than the model has \(index out of",
        ),
    ],
)
def test_a_folder_that_lacks_something_is_refused(change, sentence, tmp_path, penstock):
    save_model(tmp_path, layers=1)
    change(tmp_path)
    done = penstock("generate", tmp_path, "--prompt", PROMPT, "--memory", "2MB")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert re.match(f"penstock: {tmp_path} {sentence}", done.err)


def test_a_name_that_is_not_in_the_cache_offline_is_one_command(tmp_path, penstock, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    done = penstock("generate", "nobody/nothing", "--prompt", PROMPT)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        "penstock: 'nobody/nothing' is neither a folder nor a model in the local cache: download it first, "
        "with `hf download nobody/nothing`\n"
    )
