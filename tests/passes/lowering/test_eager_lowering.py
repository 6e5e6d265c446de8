"""Every model of `pass_models`, exported, lowered, stored, loaded and run with poisoned weights."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.passes.annotate import annotate_with_values
from penstock.passes.lowering import eager
from penstock.passes.lowering.archive import strip_weights
from penstock.passes.probes import streaming
from penstock.schedule.facts.errors import PassError, PayloadError, SourceError, StreamError
from penstock.schedule.payload.codec import ProgramFile
from tests.passes.pass_models import CASES
from tests.passes.pass_runs import export, prepare, same_bits, stored


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "raw") for name in CASES]
    + [(name, "strict") for name in ("Branches", "Cache", "Nested", "TiedEmbedding", "WithoutGrad")]
    + [(name, "decomposed") for name in ("Cache", "OneStorage", "Returned", "Scan", "TrainingStatistics")]
    + [(name, "decomposed") for name in ("Views", "WrittenInput")],
)
def test_streamed_output_has_the_bits_of_the_model(name, way):
    case = CASES[name]
    model, exported = export(case, strict=way == "strict", decomposed=way == "decomposed")
    lowered, streamer = prepare(exported)
    method = lowered.payload.methods[0]
    steps = lowered.payload.traces[0].steps
    program = eager.instantiate(lowered, streamer.tensors(), method, range(len(steps)))
    model = copy.deepcopy(model)

    for _ in range(2):
        args, kwargs = case.args(), case.kwargs()
        with torch.no_grad(), streaming(streamer):
            expected = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            streamer.log.clear()
            given = copy.deepcopy((args, kwargs))
            got = program(*given[0], **given[1])
        assert same_bits(got, expected)
        assert streamer.log == [(what, 0, k) for k in range(len(steps)) for what in ("acquire", "release")]
    kinds = {w.fqn: lowered.payload.storages[w.parts[0].storage].kind for w in lowered.payload.weights}
    assert {fqn: kind for fqn, kind in kinds.items() if kind != "streamable"} == case.kinds
    state = model.state_dict(keep_vars=True) | dict(model.named_buffers())
    for fqn in case.kinds:
        assert same_bits(streamer.tensors()[fqn], state[fqn]), fqn


@dataclass
class Answer:
    value: torch.Tensor
    twice: torch.Tensor | None = None


class Answering(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, question):
        y = self.linear(question.value)
        return Answer(y, y * 2)


def test_registered_classes_go_in_and_come_out():
    torch.export.register_dataclass(Answer, serialized_type_name="penstock_test.Answer")
    model, question = Answering(), Answer(torch.randn(2, 8))
    lowered, streamer = prepare(torch.export.export(model, (question,)))
    program = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], [0])
    with torch.no_grad(), streaming(streamer):
        got, expected = program(question), model(question)
    assert type(got) is Answer
    assert torch.equal(got.value, expected.value)
    assert torch.equal(got.twice, expected.twice)


def test_results_of_transformers_come_out_as_such():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    config.use_cache = False
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 32, (2, 6))
    dynamic = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    exported = torch.export.export(model, (), {"input_ids": ids}, dynamic_shapes=dynamic)
    lowered, streamer = prepare(exported)
    steps = range(len(lowered.payload.traces[0].steps))
    program = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], steps)
    ids = torch.randint(0, 32, (3, 9))
    with torch.no_grad(), streaming(streamer):
        got, expected = program(input_ids=ids), model(input_ids=ids)
    assert type(got) is type(expected)
    assert torch.equal(got.logits, expected.logits)


def test_stripping_leaves_the_program_alone_and_keeps_no_bytes():
    _, exported = export(CASES["Cache"])
    before = {**exported.state_dict, **exported.constants}
    stripped = strip_weights(exported)
    assert {value.device.type for value in {**stripped.state_dict, **stripped.constants}.values()} == {"meta"}
    assert stripped.example_inputs is None
    assert exported.example_inputs is not None
    assert all(value is before[name] for name, value in {**exported.state_dict, **exported.constants}.items())


def test_weights_without_values_lower():
    with FakeTensorMode():
        model = CASES["TiedEmbedding"].build()
        exported = torch.export.export(model, (torch.zeros(1, 2, dtype=torch.int64),))
    annotated = annotate_with_values(exported)
    lowered = stored(annotated)
    assert [w.fqn for w in lowered.payload.weights] == ["embed.weight", "head.weight"]
    assert len(lowered.payload.storages) == 1


@pytest.fixture(scope="module")
def reused():
    return prepare(export(CASES["Reused"])[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: None, "weight 'a.weight' is not bound"),
        (lambda w: w.double(), "weight 'a.weight' is bound to .*float64.* expected .*float32"),
        (lambda w: w.t(), "is bound to"),
        (lambda w: w.clone().requires_grad_(), "that requires grad, expected"),
    ],
)
def test_tensors_that_are_not_the_weights_are_refused(reused, change, words):
    lowered, streamer = reused
    tensors = streamer.tensors()
    changed = change(tensors.pop("a.weight"))
    if changed is not None:
        tensors["a.weight"] = changed
    with pytest.raises(StreamError, match=words):
        eager.instantiate(lowered, tensors, lowered.payload.methods[0], ())


def test_a_payload_of_another_program_is_refused(reused):
    lowered, streamer = reused
    trace = lowered.payload.traces[0]
    steps = (replace(trace.steps[0], name="elsewhere"), *trace.steps[1:])
    other = replace(lowered.payload, traces=(replace(trace, steps=steps),))
    with pytest.raises(
        PassError, match=r"step 0 \(elsewhere\) of method 'forward' is not in the lowered program"
    ):
        eager.instantiate(replace(lowered, payload=other), streamer.tensors(), other.methods[0], [0])


def test_files_that_are_no_programs_are_refused(reused, tmp_path):
    lowered, _ = reused
    payload = replace(lowered.payload, program=ProgramFile("program.zip", "0" * 64))
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        eager.load(tmp_path, payload)
    (tmp_path / "program.zip").write_bytes(b"PK" + bytes(100))
    with pytest.raises(PayloadError, match="cannot be loaded"):
        eager.load(tmp_path, payload)


def test_an_error_in_the_program_prints_nothing(reused, capsys):
    lowered, streamer = reused
    program = eager.instantiate(lowered, streamer.tensors(), lowered.payload.methods[0], [0])
    with pytest.raises(StreamError, match="outside a streamed module"):
        program(torch.randn(3, 8))
    assert capsys.readouterr() == ("", "")
