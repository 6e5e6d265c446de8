"""Models whose reads a compiler moves about, compiled once for all tests that need them."""

import fcntl
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._inductor import aot_compile
from torch._inductor.package.package import load_package, package_aoti
from torch.nn import functional

import penstock
from penstock.passes.lowering import inductor
from penstock.runtime.program import Program

OLD = torch.__version__.startswith("2.11.")
"""Its AOTInductor calls a grouped product that its own headers lack."""

WIDTH, VOCABULARY, POSITIONS = 32, 90, 12


class Layer(nn.Module):
    """Attention over a cache that the call writes, and a gated product."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("keys", torch.zeros(1, POSITIONS, WIDTH))
        self.register_buffer("values", torch.zeros(1, POSITIONS, WIDTH))

    def forward(self, x, positions):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        self.keys.index_copy_(1, positions, k)
        self.values.index_copy_(1, positions, v)
        mask = torch.arange(POSITIONS)[None, :] <= positions[:, None]
        attended = functional.scaled_dot_product_attention(q, self.keys, self.values, mask[None])
        x = x + self.drop(self.out(attended))
        a, b = self.gate(x).chunk(2, -1)
        return x + self.down(functional.silu(a) * b)


class Decoder(nn.Module):
    """An embedding tied to the output, layers with caches, and a scale of three values that is inlined."""

    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, 3.0, 2.0]))

    def forward(self, tokens, positions):
        x = self.embedding(tokens) * self.scale[1]
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


class Odd(nn.Module):
    """Weights read through views, twice, by several kernels at once, and inside control flow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.lower = nn.Parameter(self.both.detach()[WIDTH:])
        self.conv = nn.Conv2d(3, 16, 3)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH, dtype=torch.bfloat16))
        self.table = nn.Parameter(torch.randn(100, WIDTH))
        self.drop = nn.Dropout()

    def forward(self, x, image, rows):
        x = x + self.table[rows]
        x = torch.cond(x.sum() > 0, self.a, self.b, (x,))
        left, right = self.both.chunk(2)
        x = self.drop(x) @ torch.cat([right, left]).t()[:, :WIDTH]
        x = x @ self.lower.t() + self.drop(self.table)[rows + 1]

        def body(i, x):
            return i + 1, torch.tanh(x @ self.b.weight)

        _, x = torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))
        y, _ = self.lstm(x[None])
        ends = torch.tensor([1, 2, 3, 5], dtype=torch.int32)
        if OLD:
            z = torch.bmm(y.bfloat16().expand(4, -1, -1), self.experts).sum(0)
        else:
            z = functional.grouped_mm(y[0].bfloat16(), self.experts, offs=ends)
        return {"mixed": z + self.a.weight[0], "image": self.conv(image).relu()}


def decoder(layers=3):
    torch.manual_seed(0)
    return Decoder(layers).eval()


def odd():
    torch.manual_seed(1)
    return Odd().eval()


def decoder_arguments(length, first=0):
    return torch.arange(length)[None] + 3, torch.arange(first, first + length)


def odd_arguments():
    torch.manual_seed(2)
    return torch.randn(5, WIDTH), torch.randn(1, 3, 8, 8), torch.tensor([3, 1, 4, 1, 5])


def export(module, arguments, **options):
    return torch.export.export(module, arguments, **options)


def compile_plainly(exported, folder, name):
    """What AOTInductor makes of the program by itself, over weights of 64-byte alignment."""
    args, kwargs = exported.example_inputs or ((), {})
    files = aot_compile(
        exported.module(check_guards=False),
        args,
        kwargs,
        options={"aot_inductor.package": True, "aot_inductor.package_constants_in_so": False},
    )
    path = folder / f"{name}.pt2"
    package_aoti(str(path), {"model": list(files)})
    runner = load_package(str(path))
    values = {**exported.state_dict, **exported.constants}
    runner.load_constants(
        {fqn: aligned(values[fqn].detach()) for fqn in runner.get_constant_fqns()}, check_full_update=True
    )
    return runner


def aligned(value):
    copied = value.clone(memory_format=torch.preserve_format)
    assert copied.data_ptr() % 64 == 0
    return copied


def as_mapping(module, lengths):
    return {name: export(module, decoder_arguments(length)) for name, length in lengths.items()}


@dataclass(frozen=True)
class Artifact:
    """A compiled artifact, and what plain AOTInductor returns for the same calls."""

    program: Program
    expected: Any
    wrappers: dict[str, tuple[str, str]]


def compile_streaming(programs, path):
    penstock.compile(programs, path, lowering="inductor", resident_below="1KiB")


def wrappers_of(path):
    """The emitted source of each method, and the operators that it calls."""
    with zipfile.ZipFile(path / inductor.PROGRAM) as outer, outer.open(inductor.PACKAGE) as inner:
        archive = zipfile.ZipFile(inner)
        names = archive.namelist()
        found = {}
        for name in names:
            if name.endswith(".wrapper.cpp"):
                method, nodes = name.split("/")[-2], name.replace(".wrapper.cpp", ".wrapper.json")
                found[method] = (archive.read(name).decode(), archive.read(nodes).decode())
        return found


def compile_models(folder):
    """Both models, streamed and plain, compiled by the first of all processes that ask in this folder."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "expected.pt").exists():
            expected = _compile_both(folder)
            torch.save(expected, folder / "being-written.pt")
            (folder / "being-written.pt").rename(folder / "expected.pt")
    found = {}
    for name, expected in torch.load(folder / "expected.pt").items():
        path = folder / f"{name}.penstock"
        found[name] = Artifact(penstock.open(path, trust=True), expected, wrappers_of(path))
    return found


def _compile_both(folder):
    """Compile both models into a folder; returns what plain AOTInductor answers."""
    programs = as_mapping(decoder(), {"prefill": 5, "decode": 1})
    plain = {name: compile_plainly(one, folder, name) for name, one in programs.items()}
    expected = [plain["prefill"](*decoder_arguments(5)), plain["decode"](*decoder_arguments(1))]
    one = export(odd(), odd_arguments())
    answer = compile_plainly(one, folder, "odd")(*odd_arguments())
    compile_streaming(programs, folder / "decoder.penstock")
    compile_streaming({"forward": one}, folder / "odd.penstock")
    return {"decoder": expected, "odd": answer}
