"""Options that defeat streaming, and artifacts of another machine, are refused by name."""

from dataclasses import replace

import pytest
import torch

import penstock
from penstock import LoadOptions
from penstock.passes.lowering import compiled as compiled_code
from penstock.runtime.program import Program
from tests.runtime.compiled_models import export

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freezing": True}, "'freezing' folds weights into constants"),
        ({"aot_inductor.package_constants_in_so": True}, "puts the weights into the shared object"),
        ({"aot_inductor.use_runtime_constant_folding": True}, "computes with weights once"),
    ],
)
def test_options_that_defeat_streaming_are_refused(tmp_path, options, message):
    exported = export(torch.nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(penstock.PassError, match=message):
        penstock.compile(exported, tmp_path / "m.penstock", lowering="inductor", options=options)
    assert not (tmp_path / "m.penstock").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "2.1.0"}, r"compiled by torch 2\.1\.0, and this is torch"),
        ({"machine": "cpu linux riscv64"}, "compiled for linux riscv64"),
        ({"machine": "cpu linux x86_64 AVX1024"}, "a processor with AVX1024"),
    ],
)
def test_an_artifact_of_another_machine_is_refused_by_name(compiled, change, message):
    payload = compiled["odd"].program.payload
    assert payload.program is not None
    if "machine" in change:
        payload = replace(payload, program=replace(payload.program, **change))
    else:
        payload = replace(payload, **change)
    with pytest.raises(penstock.PayloadError, match=message):
        Program(compiled["odd"].program.path, payload, trust=True).load("50%")


def test_code_that_reads_a_weight_that_no_step_brings(compiled):
    program = compiled["odd"].program
    (trace, *others) = program.payload.traces
    read = trace.steps[-1].reads[0]
    steps = tuple(replace(step, reads=tuple(s for s in step.reads if s != read)) for step in trace.steps)
    payload = replace(program.payload, traces=(replace(trace, steps=steps), *others))
    name = next(w.fqn for w in payload.tensors if w.parts[0].storage == read)
    with pytest.raises(penstock.PayloadError, match=f"'{name}', and no step of its trace does"):
        compiled_code.load(program.path, payload, trust=True)


class Conjugated(torch.nn.Module):
    """Weights that an operator without a shim hands out again as a view."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = (torch.nn.Parameter(torch.randn(16, 16, dtype=torch.complex64)) for _ in range(2))
        self.register_buffer("scale", self.b.detach()[0, :3].real.contiguous())

    def forward(self, x):
        w = self.a.conj()
        return w @ (w @ x @ self.b) @ w


@pytest.mark.usefixtures("compiler")
def test_a_view_from_an_operator_without_a_shim_is_followed(tmp_path):
    module = Conjugated().eval()
    x = torch.randn(16, 16, dtype=torch.complex64)
    program = penstock.compile(
        export(module, (x,)), tmp_path / "m.penstock", lowering="inductor", resident_below=0
    )
    storage = next(w.parts[0].storage for w in program.payload.weights if w.fqn == "a")
    assert sum(storage in step.reads for step in program.payload.traces[0].steps) >= 2
    with (
        program.load(
            program.floor(arena="contiguous"), options=LoadOptions(arena="contiguous", poison=True)
        ) as loaded,
        torch.no_grad(),
    ):
        torch.testing.assert_close(loaded(x), module(x))


class SmallView(torch.nn.Module):
    """A vector that the compiler copies into the code, and that lies inside a large weight."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(100, 64))
        self.register_buffer("scale", self.table.detach()[0, :3])

    def forward(self, x):
        return (x @ self.table.t()) * self.scale[1]


@pytest.mark.usefixtures("compiler")
def test_small_views_keep_their_values_and_inputs_may_have_any_strides(tmp_path):
    module = SmallView().eval()
    program = penstock.compile(
        export(module, (torch.randn(64, 64),)), tmp_path / "m.penstock", lowering="inductor", resident_below=0
    )
    x = torch.randn(64, 64)
    with program.load("100%") as loaded, torch.no_grad():
        for given in (x, x.t(), torch.randn(64, 128)[:, ::2], torch.randn(1, 64).expand(64, 64)):
            torch.testing.assert_close(loaded(given), module(given))
