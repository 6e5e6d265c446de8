"""Which experts are computed one at a time from quantised ones, with the bits of all at once."""

import pytest
import torch
from torch.export import export

from penstock.passes.annotate import annotate_with_values
from penstock.passes.calls.stored_graph import decode_graph, encode_graph
from penstock.passes.sparse.chains import by_expert
from penstock.passes.sparse.contracts import BY_EXPERT
from penstock.schedule.sparse import pool
from tests.passes.pass_models import Calls

COUNT, ROWS, WIDTH, OUT = 6, 10, 16, 32
ENDS = torch.tensor([0, 3, 3, 7, 10, 10], dtype=torch.int32)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(pool, "LEAST", 1)


def integers(*shape, low=-128, dtype=torch.int8):
    return torch.randint(low, 128, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def numbers(*shape, dtype=torch.float32):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (made / 64).to(dtype)


SCALE = numbers(COUNT, OUT, 1)
TENSORS = {
    "w": integers(COUNT, OUT, WIDTH),
    "f": numbers(COUNT, OUT, WIDTH).to(torch.float8_e4m3fn),
    "packed": integers(COUNT, OUT, WIDTH // 2, low=0, dtype=torch.uint8),
    "scale": SCALE,
    "halves": numbers(COUNT, OUT, 2, dtype=torch.bfloat16),
    "one": numbers(1, OUT, 1),
    "halved": numbers(COUNT, OUT, WIDTH, dtype=torch.bfloat16),
    "row": numbers(WIDTH),
    "numbers": numbers(16),
    "order": torch.tensor([1, 0, 2, 5, 4, 3]),
    "zero": integers(COUNT, OUT, 1),
    "wide": integers(COUNT, 1, 1, low=100, dtype=torch.int32) * 37,
    "single": numbers(COUNT, 1, 1, dtype=torch.bfloat16),
    "heads": integers(COUNT, OUT, WIDTH, low=0, dtype=torch.uint8),
    "names": numbers(COUNT),
}


def product(stack, *, dtype=torch.bfloat16):
    def call(m, rows, ends):
        return torch._grouped_mm(rows, stack(m).to(dtype), ends)

    return Calls(call, **TENSORS)


def exported(model):
    with torch.no_grad():
        return export(model, (numbers(ROWS, WIDTH, dtype=torch.bfloat16), ENDS))


def made(model, trusts=True):
    return by_expert(exported(model), lambda _: trusts)


def bodies(program):
    return [node for node in program.graph.nodes if node.target is BY_EXPERT]


def _unpacked(m):
    low, high = (m.packed & 15).to(torch.bfloat16), (m.packed >> 4).to(torch.bfloat16)
    return torch.stack((low, high), 3).flatten(2)


CHAINS = {
    "a scale for each row": lambda m: (m.w.to(torch.float32) * m.scale).transpose(1, 2),
    "as torchao has it": lambda m: m.f.transpose(-2, -1).to(torch.float32) * m.scale.transpose(-2, -1),
    "a zero point": lambda m: ((m.w.to(torch.float32) - m.zero) * m.scale).mT,
    "blocks": lambda m: (
        (m.w.view(COUNT, OUT, 2, -1).to(torch.bfloat16) * m.halves.unsqueeze(-1))
        .reshape(COUNT, OUT, WIDTH)
        .permute(0, 2, 1)
    ),
    "two of each byte": lambda m: (_unpacked(m) * m.scale).transpose(1, 2),
    "a table of numbers": lambda m: (torch.cat(2 * (m.numbers[(m.packed & 15).long()],), -1) * m.scale).mT,
    "squares": lambda m: ((v := m.w.to(torch.float32)) * v).transpose(1, 2),
    "one scale for all": lambda m: (m.w.to(torch.float32) * m.one).transpose(1, 2),
    "a vector": lambda m: (m.w.to(torch.float32) / m.row).transpose(1, 2),
    "a mean of all": lambda m: (m.w - m.w.to(torch.float32).mean(0, keepdim=True)).transpose(1, 2),
    "a number": lambda m: (m.w * 0.125 + 1).transpose(1, 2),
    "half of each byte": lambda m: (
        ((m.packed & 15).to(torch.bfloat16) - 8)
        .unsqueeze(3)
        .expand(COUNT, OUT, WIDTH // 2, 2)
        .reshape(COUNT, OUT, WIDTH)
        .transpose(1, 2)
    ),
    "a number for each": lambda m: (m.w.to(torch.bfloat16) * m.single).mT,
    "a name in each": lambda m: (
        (m.heads.to(torch.float32) * m.names[(m.heads[:, 0, 0] & 3).long()][:, None, None]).mT
    ),
    "a slice of each": lambda m: (
        m.w[:, :, : WIDTH // 2].to(torch.float32).reshape(COUNT, OUT // 2, WIDTH) * m.row
    ).transpose(1, 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_are_computed_one_expert_at_a_time(name):
    model = product(CHAINS[name])
    program = made(model)
    (node,) = bodies(program)
    assert node.args[3].op == "placeholder"
    assert not any("grouped_mm" in str(value.target) for value in program.graph.nodes)
    annotated = annotate_with_values(exported(model), trusts=lambda _: True)
    (trace,) = annotated.payload.traces
    (read,) = [one for step in trace.steps for one in step.sparse]
    assert read.computed is not None
    assert read.computed.shape[0] == read.count == COUNT
    assert read.asked == COUNT
    assert read.operator == "aten._grouped_mm.default"
    given = numbers(ROWS, WIDTH, dtype=torch.bfloat16), ENDS
    want = model(*given)
    stored = encode_graph(program.graph_module)  # and so it is, once it has been stored
    graph, inner = decode_graph(stored)
    specs = program.graph_signature.input_specs[: -len(given)]
    held = [program.state_dict[str(spec.target)] for spec in specs]
    (got,) = torch.fx.GraphModule(inner, graph).forward(*held, *given)
    assert torch.equal(got, want)


def _read_elsewhere(m, rows, ends):
    middle = m.w.to(torch.float32) * m.scale
    made = torch._grouped_mm(rows, middle.transpose(1, 2).to(torch.bfloat16), ends)
    return made, middle.sum()


def _used_twice(m, rows, ends):
    stack = (m.w.to(torch.float32) * m.scale).transpose(1, 2).to(torch.bfloat16)
    return torch._grouped_mm(rows, stack, ends) + torch._grouped_mm(-rows, stack, ends)


def _written_between(m, rows, ends):
    stack = (m.w.to(torch.float32) * m.scale).transpose(1, 2).to(torch.bfloat16)
    m.scale.mul_(2)
    return torch._grouped_mm(rows, stack, ends)


def _written_inside(m, rows, ends):
    stack = (m.w.to(torch.float32) * m.scale).transpose(1, 2).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        m.scale.mul_(2)
    return torch._grouped_mm(rows, stack, ends)


def _rows_of_it(m, rows, ends):
    first = m.w[:, 0].to(torch.bfloat16)
    return torch._grouped_mm(
        first, (m.w.to(torch.bfloat16) * first[:, None]).transpose(1, 2), ends.clamp(max=6)
    )


def _ends_of_it(m, rows, ends):
    last = m.w[:, 0, 0].to(torch.int32)
    return torch._grouped_mm(rows, (m.w * last[:, None, None]).transpose(1, 2).to(rows.dtype), last)


WHOLE = {
    "something is written in a body": Calls(_written_inside, **TENSORS),
    "rows out of the middle": Calls(_rows_of_it, **TENSORS),
    "ends out of the middle": Calls(_ends_of_it, **TENSORS),
    "an integer for each, not rounded": product(lambda m: (m.w.to(torch.bfloat16) * m.wide).mT),
    "a divisor for each, not rounded": product(lambda m: (m.w.to(torch.float16) / m.wide).mT),
    "a product of 8 bits": product(lambda m: (m.f * m.single.to(torch.float8_e4m3fn)).mT),
    "the middle is read elsewhere": Calls(_read_elsewhere, **TENSORS),
    "two products": Calls(_used_twice, **TENSORS),
    "something is written between": Calls(_written_between, **TENSORS),
    "experts in another order": product(lambda m: m.w.flip(0).to(torch.float32).transpose(1, 2)),
    "a function that does not round correctly": product(lambda m: (m.w * m.scale).exp().transpose(1, 2)),
    "experts one behind the other": product(
        lambda m: torch.cat((m.w[:2], m.w[2:])).to(torch.float32).transpose(1, 2)
    ),
    "views, and no conversion": product(lambda m: m.halved.to(torch.bfloat16).transpose(1, 2)),
    "experts that a table orders": product(lambda m: m.w[m.order].to(torch.float32).transpose(1, 2)),
    "rounded division": product(lambda m: m.w.to(torch.float32).div(m.row, rounding_mode="floor").mT),
    "a factor of the second": product(lambda m: torch.add(m.w.to(torch.float32), m.scale, alpha=3).mT),
}


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_computed_as_they_are(name):
    program = exported(WHOLE[name])
    assert by_expert(program, lambda _: True) is program


def test_dimension_0_has_to_stay_outermost():
    square = {"w": integers(COUNT, COUNT, WIDTH)}
    model = Calls(lambda m, x, e: torch._grouped_mm(x, m.w.transpose(0, 1).to(x.dtype).mT, e), **square)
    assert bodies(made(model)) == []
    model = Calls(lambda m, x, e: torch._grouped_mm(x, m.w.permute(1, 0, 2).to(x.dtype).mT, e), **square)
    assert bodies(made(model)) == []
    model = Calls(lambda m, x, e: torch._grouped_mm(x, m.w.to(x.dtype).mT, e), **square)
    assert len(bodies(made(model))) == 1


def test_small_stacks_and_products_that_are_not_trusted_stay(monkeypatch):
    model = product(CHAINS["a scale for each row"])
    assert bodies(made(model, trusts=False)) == []
    monkeypatch.setattr(pool, "LEAST", COUNT * OUT * WIDTH)
    assert len(bodies(made(model))) == 1
    monkeypatch.setattr(pool, "LEAST", COUNT * OUT * WIDTH + 1)
    assert bodies(made(model)) == []
