import io
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock
from penstock.passes.weights.subclasses import PARTS, with_plain_parts
from penstock.schedule.facts.errors import PassError
from tests.quantised_models import Hidden, Opaque, Packed, Shown, linears, pack, quantise

x = torch.linspace(-1, 1, 3 * 256).reshape(3, 256)


def export(module, *, strict=False, **options):
    return torch.export.export(module, (x,), strict=strict, **options)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_a_weight_of_several_parts_is_one_weight(kind, strict):
    module = quantise(linears(layers=2), kind)
    exported = export(module, strict=strict)
    weights = {w.fqn: w for w in penstock.annotate(exported).weights}
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    parts = weights["0.weight"].parts
    assert [(p.name, p.dtype, p.shape) for p in parts] == [
        ("data_", "int8", (512, 256)),
        ("scale", "float32", (512, 1)),
    ]
    assert [p.name for p in weights["0.bias"].parts] == [""]


@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_the_opened_program_computes_the_same_and_copies_no_part(kind):
    module = quantise(linears(layers=2), kind)
    opened = with_plain_parts(export(module))
    with torch.no_grad():
        assert torch.equal(opened.module()(x), module(x))
    assert type(opened.state_dict["0.weight.scale"]) is nn.Parameter
    assert opened.state_dict["0.weight.data_"].data_ptr() == module[0].weight.data_.data_ptr()
    assert "0.weight" not in opened.state_dict
    code = opened.graph_module.code
    opened.graph_module.recompile()
    assert opened.graph_module.code == code


@pytest.mark.parametrize("change", [lambda part: None, lambda part: part.double(), lambda part: part[:1]])
def test_parts_that_torch_has_taken_out_otherwise_are_refused(change, monkeypatch):
    decompose = torch.export.ExportedProgram.run_decompositions

    def decomposed_otherwise(exported, *args):
        opened = decompose(exported, *args)
        opened._state_dict = {
            name: change(value) if "original" in name else value for name, value in opened.state_dict.items()
        }
        return opened

    exported = export(quantise(linears(layers=2), Hidden))
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", decomposed_otherwise)
    with pytest.raises(PassError, match="whose parts the graph does not show: dequantise this weight"):
        with_plain_parts(exported)


@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_parts_without_values_are_parts(kind):
    with FakeTensorMode():
        module = linears(layers=2)
        parts = torch.zeros(512, 256, dtype=torch.int8), torch.zeros(512, 1), torch.float32
        module[0].weight = nn.Parameter(kind(*parts), requires_grad=False)
        exported = torch.export.export(module, (torch.zeros(3, 256),), strict=False)
    weights = {w.fqn: w for w in penstock.annotate(exported).weights}
    assert [p.name for p in weights["0.weight"].parts] == ["data_", "scale"]


def test_a_program_of_plain_weights_stays_itself():
    exported = export(linears(layers=2))
    assert with_plain_parts(exported) is exported


def test_opening_twice_is_opening_once():
    opened = with_plain_parts(export(quantise(linears(layers=2), Shown)))
    assert with_plain_parts(opened) is opened
    assert opened.graph_module.meta[PARTS]["0.weight.scale"] == ("0.weight", "scale")


def test_what_export_was_given_is_not_changed():
    exported = export(quantise(linears(layers=2), Shown))
    before = str(exported.graph)
    with_plain_parts(exported)
    assert str(exported.graph) == before
    assert isinstance(exported.state_dict["0.weight"], Shown)


@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_parts_of_parts_have_names_with_dots(kind):
    module = quantise(linears(layers=2), kind, nested=True)
    payload = penstock.annotate(export(module))
    weight = next(w for w in payload.weights if w.fqn == "2.weight")
    assert [p.name for p in weight.parts] == ["data_", "scale.data_", "scale.scale"]
    with torch.no_grad():
        assert torch.equal(with_plain_parts(export(module)).module()(x), module(x))


def test_inputs_keep_their_names_and_sizes_their_guards():
    rows = torch.export.Dim("rows", min=2, max=64)
    for kind in (Shown, Hidden):
        exported = export(quantise(linears(layers=2), kind), dynamic_shapes=({0: rows},))
        (method,) = penstock.annotate(exported).methods
        assert [leaf.name for leaf in method.inputs] == ["input"]
        assert [(symbol.lower, symbol.upper) for symbol in method.symbols] == [(2, 64)]


@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_buffers_may_be_of_several_parts_too(kind):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", pack(torch.randn(8, 256), kind))

        def forward(self, x):
            return nn.functional.linear(x, self.table)

    (weight,) = penstock.annotate(export(Buffered())).weights
    assert (weight.fqn, weight.role, len(weight.parts)) == ("table", "buffer", 2)


def test_hidden_and_shown_parts_in_one_program():
    module = linears(layers=4)
    for number, kind in ((0, Shown), (2, Hidden), (4, Shown)):
        module[number].weight = nn.Parameter(pack(module[number].weight.data, kind), requires_grad=False)
    exported = export(module)
    payload = penstock.annotate(exported)
    assert {w.fqn: len(w.parts) for w in payload.weights if "weight" in w.fqn} == {
        "0.weight": 2,
        "2.weight": 2,
        "4.weight": 2,
        "6.weight": 1,
    }
    with torch.no_grad():
        assert torch.equal(with_plain_parts(exported).module()(x), module(x))


def test_parts_that_are_views_of_one_memory_are_one_storage():
    memory = torch.zeros(512 * 256 + 512 * 4, dtype=torch.uint8)
    data = memory[: 512 * 256].view(torch.int8).reshape(512, 256)
    scale = memory[512 * 256 :].view(torch.float32).reshape(512, 1)
    module = linears(layers=2)
    module[0].weight = nn.Parameter(Shown(data, scale, torch.float32), requires_grad=False)
    weight = next(w for w in penstock.annotate(export(module)).weights if w.fqn == "0.weight")
    assert [(p.storage, p.offset) for p in weight.parts] == [
        (weight.parts[0].storage, 0),
        (weight.parts[0].storage, 512 * 256),
    ]


def test_tied_weights_share_every_part():
    module = linears(layers=4)
    quantise(module, Shown)
    module[4].weight = module[0].weight
    payload = penstock.annotate(export(module))
    parts = {w.fqn: [p.storage for p in w.parts] for w in payload.weights}
    assert parts["0.weight"] == parts["4.weight"]
    first, *_ = [step.reads for step in payload.traces[0].steps]
    assert set(first) == set(parts["0.weight"])


def test_every_step_that_reads_one_part_reads_all():
    payload = penstock.annotate(export(quantise(linears(layers=4), Shown)))
    (trace,) = payload.traces
    for weight in payload.weights:
        storages = {part.storage for part in weight.parts}
        reads = [storages & set(step.reads) for step in trace.steps]
        assert storages in reads
        assert all(read in (set(), storages) for read in reads), weight.fqn
    # Without that, the product reads the data and what follows it the scale.
    assert len([s for s in trace.steps if set(s.reads) & {0, 1}]) == 2


def test_a_scale_of_two_weights_is_planned_on_its_own():
    module = quantise(linears(layers=4), Shown)
    shared = module[0].weight.scale
    for layer in (module[0], module[4]):
        layer.weight = nn.Parameter(Shown(layer.weight.data_, shared, torch.float32), requires_grad=False)
    payload = penstock.annotate(export(module))
    parts = {w.fqn: [p.storage for p in w.parts] for w in payload.weights}
    (one, scale), (other, same) = parts["0.weight"], parts["4.weight"]
    assert scale == same
    (trace,) = payload.traces
    assert not any({one, other} <= set(step.reads) for step in trace.steps)


def test_methods_share_the_parts_of_their_weights():
    module = quantise(linears(layers=2), Shown)
    payload = penstock.annotate({"short": export(module), "long": torch.export.export(module, (x[:2],))})
    assert [len(w.parts) for w in payload.weights if w.fqn == "0.weight"] == [2]
    assert len(payload.storages) == 6


def test_methods_that_take_a_weight_apart_otherwise_are_refused():
    module = quantise(linears(layers=2), Shown)
    nested = quantise(linears(layers=2), Shown, nested=True)
    with pytest.raises(PassError, match=r"weight '0.weight' has the parts .* in one method"):
        penstock.annotate({"one": export(module), "other": export(nested)})


def test_a_class_that_does_not_say_what_it_is_made_of_is_refused():
    module = linears(layers=2)
    module[2].weight = nn.Parameter(Opaque(module[2].weight.data), requires_grad=False)
    exported = export(module)
    with pytest.raises(PassError, match=r"'2.weight' is a Opaque, which does not say .*dequantise it"):
        penstock.annotate(exported)


class Stubborn(Packed):
    """Has no operators at all."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not torch.compiler.is_exporting() and func is torch.ops.aten.linear.default:
            raise NotImplementedError(f"{func} is not implemented for Stubborn")
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_class_that_torch_cannot_open_is_refused_by_name():
    exported = export(quantise(linears(layers=2), Hidden))
    for fqn in ("0.weight", "2.weight"):
        hidden = exported.state_dict[fqn]
        exported.state_dict[fqn] = Stubborn(hidden.data_, hidden.scale, hidden.dtype)
    with pytest.raises(PassError, match=r"parameter '0.weight' is a Stubborn, .* dequantise this weight"):
        penstock.annotate(exported)


def test_a_decomposed_program_that_hides_its_parts_is_refused():
    exported = export(quantise(linears(layers=2), Hidden))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        opened = export(linears(layers=2)).run_decompositions({})
    opened.state_dict["0.weight"] = exported.state_dict["0.weight"]
    with pytest.raises(PassError, match=r"'0.weight' is a Hidden.*as torch.export.export returned it"):
        penstock.annotate(opened)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", [Shown, Hidden])
def test_a_stored_program_is_opened_too(kind, nested):
    module = quantise(linears(layers=2), kind, nested=nested)
    stored = io.BytesIO()
    torch.export.save(export(module), stored)
    stored.seek(0)
    loaded = torch.export.load(stored)
    assert type(loaded.state_dict["0.weight"]) is kind
    with torch.no_grad():
        assert torch.equal(with_plain_parts(loaded).module()(x), module(x))
    assert {len(w.parts) for w in penstock.annotate(loaded).weights} == {1, 3 if nested else 2}
