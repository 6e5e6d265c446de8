"""What cannot be exported or read: one sentence each, which says what to do."""

import copy
import os
import shutil
import warnings

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.backend.canonical_partitioners.all_node_partitioner import AllNodePartitioner
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch import nn

import penstock
from penstock.backends.executorch import PenstockBackend, PenstockPartitioner, read, save
from penstock.backends.executorch.options import Settings, to_spec
from penstock.passes.trace import PRESET_CPU
from tests.backends.executorch.et_models import Mlp

pytestmark = pytest.mark.filterwarnings("ignore")  # ExecuTorch's own
SETTINGS = to_spec(Settings(PRESET_CPU))


def edge_of(model, *inputs):
    return to_edge(torch.export.export(model, inputs)).exported_program()


def lower_all(model, *specs):
    """Hands the whole program to the backend, as a partitioner that is not penstock's might."""
    manager = to_edge(torch.export.export(model.eval(), (torch.randn(2, 128),)))
    return manager.to_backend(AllNodePartitioner(PenstockBackend.__name__, list(specs)))


def test_weights_without_names_are_refused():
    program = copy.copy(edge_of(Mlp(), torch.randn(2, 128)))
    program._state_dict = {name: value for name, value in program.state_dict.items() if name != "up.weight"}
    with pytest.raises(penstock.PassError, match=r"parameter 'up\.weight' has no value in the exported"):
        PenstockPartitioner().partition(program)
    with pytest.raises(
        penstock.PassError, match="graph holds the tensor 'up_weight' as an attribute, expecte"
    ):
        PenstockPartitioner().partition(with_weights_in_the_graph())


def with_weights_in_the_graph():
    """A program with a weight that is an attribute of its graph, as another library's lowering leaves it."""
    program = edge_of(Mlp(), torch.randn(2, 128))
    module = program.graph_module
    module.register_parameter("up_weight", nn.Parameter(torch.randn(256, 128)))
    (node,) = (node for node in module.graph.nodes if node.name == "p_up_weight")
    with module.graph.inserting_before(node):
        held = module.graph.get_attr("up_weight")
    held.meta = node.meta
    node.replace_all_uses_with(held)
    module.graph.erase_node(node)
    signature = program.graph_signature
    signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name != "p_up_weight"]
    return program


def test_a_region_without_weights_is_refused():
    with pytest.raises(
        penstock.PassError, match=r"region 0 of method 'forward' reads no weights, so there is noth"
    ):
        lower_all(nn.ReLU(), SETTINGS)


def test_an_unknown_compile_spec_is_refused():
    with pytest.raises(
        penstock.PassError, match=r"is given the unknown compile spec 'budget', expected those tha"
    ):
        lower_all(Mlp(), SETTINGS, CompileSpec("budget", b"50%"))
    with pytest.raises(penstock.PayloadError, match=r"the compile spec 'penstock\.region': \$\.lead\.flops"):
        lower_all(Mlp(), SETTINGS, CompileSpec("penstock.region", b'{"lead": {"flops": "many"}}'))
    with pytest.raises(
        penstock.PassError, match=r"needs the settings of a PenstockPartitioner, .* and has none"
    ):
        lower_all(Mlp())


def test_methods_lowered_with_different_options_are_refused():
    programs = {name: torch.export.export(Mlp().eval(), (torch.randn(2, 128),)) for name in ("one", "two")}
    with pytest.raises(
        penstock.PassError, match="and has other ones for another region: lower all methods with one"
    ):
        to_edge_transform_and_lower(
            programs, partitioner={"one": [PenstockPartitioner()], "two": [PenstockPartitioner(budget="50%")]}
        )


def test_a_budget_below_the_floor_is_refused(lower):
    program = torch.export.export(Mlp().eval(), (torch.randn(2, 128),))
    with pytest.raises(
        penstock.BudgetError, match=r"below the floor of .*: step .* needs .*\.weight at once"
    ):
        lower(program, budget="64KiB")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "half"}, "budget 'half' is not a size"),
        ({"keep": "head.*"}, r"keep= takes a list of patterns, got 'head\.\*'"),
        (
            {"kernels": "cuda"},
            "kernels= is 'executorch', whose own run what is delegated, or 'aotinductor', got 'cuda'",
        ),
        ({"hardware": "h2000"}, "h2000"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(penstock.PenstockError, match=sentence):
        PenstockPartitioner(**options)


def test_a_pattern_that_matches_nothing_is_refused(lower):
    program = torch.export.export(Mlp().eval(), (torch.randn(2, 128),))
    with pytest.raises(
        penstock.PlanError, match=r"keep pattern 'head\.\*' matches no weight; the weights are up"
    ):
        lower(program, keep=["head.*"])


@torch.library.custom_op("penstock_tests::doubled", mutates_args=())
def doubled(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """An operator that ExecuTorch has never heard of."""
    return x @ (2 * weight)


@doubled.register_fake
def _(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ weight


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return doubled(self.weight, x)


def test_an_operator_without_a_kernel_is_named(lower):
    with pytest.raises(
        penstock.PassError, match="read by penstock_tests::doubled, for which ExecuTorch has no ker"
    ):
        lower(torch.export.export(Custom(), (torch.randn(2, 64),)))


# Files.


def test_an_alignment_that_no_reader_can_use_is_refused(tmp_path):
    edge = to_edge_transform_and_lower(
        torch.export.export(Mlp().eval(), (torch.randn(2, 128),)), partitioner=[PenstockPartitioner()]
    )
    program = edge.to_executorch(ExecutorchBackendConfig(segment_alignment=128))
    sentence = "expected a multiple of 4096, from which they are read in place: export with to_executorch"
    with pytest.raises(penstock.SourceError, match=rf"weights\.ptd has weights at byte \d+, {sentence}"):
        save(program, tmp_path / "model.pte")
    assert not list(tmp_path.iterdir())
    program.save(str(tmp_path / "model.pte"))
    program.write_tensor_data_to_file(str(tmp_path))
    with pytest.raises(penstock.SourceError, match=rf"weights\.ptd has weights at byte \d+, {sentence}"):
        read(tmp_path / "model.pte")


def test_a_missing_data_file_is_named(files):
    (files.parent / "weights.ptd").unlink()
    with pytest.raises(
        penstock.SourceError, match=r"weights\.ptd cannot be read: No such file .* beside the \.pte"
    ):
        read(files)


def test_the_data_file_of_another_model_is_refused(files, lowered_decoder):
    shutil.copy(lowered_decoder.path.parent / "weights.ptd", files.parent)
    with pytest.raises(
        penstock.SourceError, match=r"is not the file that was exported with model\.pte: it has no ent"
    ):
        read(files)


def spoil(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda data: data[:-4096],
            r"weights\.ptd cannot be read: it is cut off: it has \d+ bytes, and \d+ a",
        ),
        (lambda data: data[:100], r"weights\.ptd cannot be read: it is cut off: it has 100 bytes, and \d+"),
        (lambda data: b"", r"weights\.ptd cannot be read: its first bytes are not those of a \.ptd"),
        (
            lambda data: data[:48] + bytes(4096) + data[4144:],
            r"weights\.ptd (cannot be read|is not the file)",
        ),
    ],
)
def test_spoiled_data_files(files, change, sentence):
    spoil(files.parent / "weights.ptd", change)
    with pytest.raises(penstock.SourceError, match=sentence):
        read(files)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"hello", r"model\.pte is no \.pte: its first bytes are not those of a \.pte"),
        (lambda data: data[:200], r"model\.pte is no \.pte: it is cut off"),
        (
            lambda data: data.replace(b'"torch": "2.', b'"torch": "1.'),
            r"the hash of 'penstock\.payload\.[0-9a-f]+' is not that in its key",
        ),
        (
            lambda data: data.replace(b"penstock-region", b"penstock-basket"),
            "a delegate of 'forward' is damaged: the sha256 of its bytes differs",
        ),
    ],
)
def test_spoiled_programs(files, change, sentence):
    spoil(files, change)
    with pytest.raises(penstock.PayloadError, match=sentence):
        read(files)


def test_a_program_without_penstock_says_so(tmp_path):
    program = to_edge(torch.export.export(nn.ReLU(), (torch.randn(2),))).to_executorch()
    with pytest.raises(
        penstock.PayloadError, match="holds no payloads of penstock, expected one: lower all methods"
    ):
        save(program, tmp_path / "model.pte")


def test_files_are_not_replaced_unasked(lowered_mlp):
    with pytest.raises(penstock.SourceError, match=r"weights\.ptd exists; .*\(force=True\)"):
        save(lowered_mlp.program, lowered_mlp.path)
    with pytest.raises(penstock.SourceError, match=r"goes to a file with the ending \.pte, got .*model\.bin"):
        save(lowered_mlp.program, lowered_mlp.path.with_suffix(".bin"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(lowered_mlp.path) == lowered_mlp.exported


def test_a_program_without_the_values_that_its_payload_names_is_refused(files, lowered_decoder, monkeypatch):
    before = {path.name: path.read_bytes() for path in files.parent.iterdir()}
    monkeypatch.setattr(lowered_decoder.program, "_tensor_data", {})
    with pytest.raises(penstock.SourceError, match=r"has no values for weights\.ptd: export again"):
        save(lowered_decoder.program, files, force=True)
    assert {path.name: path.read_bytes() for path in files.parent.iterdir()} == before


def test_a_program_that_cannot_be_written_leaves_the_files_as_they_were(files, lowered_decoder, monkeypatch):
    before = {path.name: path.read_bytes() for path in files.parent.iterdir()}
    flush, flushed = os.fsync, []

    def refuse_last(fd):
        if len(flushed) == 1:
            raise OSError(28, "No space left on device")
        flushed.append(fd)
        flush(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse_last)
        with pytest.raises(penstock.SourceError, match=r"model\.pte could not be written .* is unchanged"):
            save(lowered_decoder.program, files, force=True)
    assert {path.name: path.read_bytes() for path in files.parent.iterdir()} == before
    assert read(save(lowered_decoder.program, files, force=True)).payload == lowered_decoder.exported.payload
