"""Whole artifacts, changed and run: each gives the bits of its own program in memory, or is refused.

A case is one JSON document, which has the payload and the stored code of one of them, and is written with
all hashes right. What a changed artifact means is for its maker to say. But a plan, a trace or an arena may
decide only when bytes move: so whatever runs is compared with the same program on the same bytes of the
files, which are read here, one tensor for each storage, before the first node runs. Memory that is freed is
poisoned, and memory that nothing fills is not what the files have.
"""

import atexit
import hashlib
import json
import random
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock import LoadOptions
from penstock.passes.lowering import eager
from penstock.passes.weights.lifted import tensor_in
from tests.passes.pass_runs import same_bits
from tests.trust.hostile import Model, X, change_payload
from tests.trust.mutations import exchange, mutate_bytes, mutate_tree

OPERATORS = (
    "aten.relu.default",
    "aten.t.default",
    "aten.neg.default",
    "aten.contiguous.default",
    "aten.linear.default",
    "aten.add.Tensor",
    "aten.add_.Tensor",
    "aten.mul.Tensor",
    "aten.matmul.default",
    "aten.embedding.default",
    "aten.dropout.default",
    "aten.detach.default",
    "aten.zero_.default",
    "aten.sum.default",
    "aten.unsqueeze_.default",
    "aten.sym_size.int",
)
"""What a node may call instead. Their results are numbers that their arguments decide."""


class WrongBitsError(Exception):
    """An artifact ran, and gave other bits than its program in memory."""


class Kinds(nn.Module):
    """A table that is read by rows, a buffer that is written, tied weights, a view, and a branch."""

    cache: torch.Tensor

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4096, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.halves = nn.Parameter(torch.randn(128, 64))
        self.register_buffer("cache", torch.zeros(4, 64))

    def forward(self, numbers):
        x = self.first(self.table(numbers))
        self.cache[1] = x[0]
        upper, lower = self.halves.chunk(2)
        x = torch.cond(x.sum() > 0, lambda y: y @ upper, lambda y: y @ lower.t(), (x,))
        return self.second(x), self.cache + 1


@dataclass(frozen=True)
class Whole:
    """An artifact, the files of its program that are not changed, and what a call is given.

    `documents` are the cases that are not changed. Most have plans, as to make one takes as long as all else.
    """

    path: Path
    members: Mapping[str, bytes]
    arguments: tuple[torch.Tensor, ...]
    documents: tuple[bytes, ...]

    def use(self, document, chosen):
        """Write, open, plan, load and call. Raises what of penstock refuses it, or WrongBitsError."""
        code = document["code"]
        data = code.encode("latin-1") if isinstance(code, str) else json.dumps(code).encode()
        self._write(document["payload"], data)
        program = penstock.open(self.path)
        plans = program.payload.plans
        if plans and chosen.random() < 0.95:
            plan = chosen.choice(plans)
        else:
            arena = chosen.choice(program.arenas())
            floor = program.floor(arena=arena)
            budget = max(floor, chosen.choice((1, program.largest_budget * 9 // 10)))
            plan = program.plan(budget, hardware="laptop", arena=arena)
        poison = plan.arena.kind == "contiguous"
        engine = chosen.choice(("auto", "python"))
        with program.load(plan=plan, options=LoadOptions(poison=poison, engine=engine, readers=1)) as module:
            reference = in_memory(program)
            for _ in range(2):
                _compare(_result(module, self.arguments), _result(reference, self.arguments))

    def _write(self, payload, code):
        program = self.path / "program.zip"
        with zipfile.ZipFile(program, "w", zipfile.ZIP_STORED) as archive:
            for name, member in (self.members | {"forward.json": code}).items():
                archive.writestr(name, member)
        digest = hashlib.sha256(program.read_bytes()).hexdigest()
        if isinstance(payload.get("program"), dict):
            payload["program"]["sha256"] = digest
        change_payload(self.path, lambda before: (before.clear(), before.update(payload)))


def in_memory(program):
    """The program of an artifact on tensors that hold what the files have, each for itself."""
    payload = program.payload
    storages = [_bytes_of(storage, payload, program.path) for storage in payload.storages]
    tensors = {w.fqn: tensor_in(storages[w.parts[0].storage], w.parts[0]) for w in payload.tensors}
    return eager.instantiate(program.lowered, tensors, payload.methods[0], ())


def _bytes_of(storage, payload, folder):
    """All bytes of a storage, at an address of its phase."""
    whole = torch.empty(storage.nbytes + 128, dtype=torch.uint8)
    start = (storage.phase - whole.data_ptr()) % 64
    held = whole[start : start + storage.nbytes]
    for extent in storage.extents:
        with (folder / payload.files[extent.file].path).open("rb") as file:
            file.seek(extent.file_offset)
            read = bytearray(file.read(extent.nbytes))
        held[extent.storage_offset : extent.storage_offset + extent.nbytes] = torch.frombuffer(
            read, dtype=torch.uint8
        )
    return held


def _result(call, arguments):
    """What a call returns, or the type of what an operator raises."""
    try:
        with torch.no_grad():
            return call(*(one.clone() for one in arguments))
    except penstock.PenstockError:
        raise
    except Exception as error:
        return type(error)


def _compare(got, expected):
    if isinstance(got, type) or isinstance(expected, type):
        if got is not expected:
            raise WrongBitsError(f"it ended in {got!r:.60}, and in memory in {expected!r:.60}")
    elif not same_bits(got, expected):
        raise WrongBitsError("it gave other bits than its program in memory")


class Wholes:
    """The artifacts that are changed, in a folder."""

    def __init__(self, folder):
        torch.manual_seed(0)
        auto = torch.export.Dim.AUTO
        self._by_name = {
            "plain": _made(folder, "plain", Model(), (X, torch.ones(5)), ({0: auto}, {0: auto})),
            "kinds": _made(folder, "kinds", Kinds(), (torch.tensor([5, 4000, 5, 17]),)),
        }
        self.documents = tuple(one for whole in self._by_name.values() for one in whole.documents)

    def use(self, data):
        """Do what `Whole.use` does with the case of a document."""
        document = json.loads(data)
        self._by_name[document["artifact"]].use(document, random.Random(data))


@cache
def wholes():
    """The artifacts of this process, which are made once."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Wholes(Path(folder))


def _made(folder, name, model, arguments, sizes=None):
    path = folder / f"{name}.penstock"
    exported = torch.export.export(model.eval().requires_grad_(False), arguments, dynamic_shapes=sizes)
    program = penstock.compile(exported, path)
    with zipfile.ZipFile(path / "program.zip") as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    code = json.loads(members.pop("forward.json"))
    plans = {
        plan.to_json(): plan
        for arena in program.arenas()
        for share in (0, 2)
        if (plan := _plan(program, arena, program.largest_budget * share // 3))
    }
    documents = [
        {"artifact": name, "payload": json.loads(payload.to_bytes()), "code": code}
        for payload in (program.payload, *[replace(program.payload, plans=tuple(plans.values()))] * 3)
    ]
    return Whole(path, members, arguments, tuple(json.dumps(one).encode() for one in documents))


def _plan(program, arena, budget):
    return program.plan(max(budget, program.floor(arena=arena)), hardware="laptop", arena=arena)


def change_facts(chosen, data):
    """Changes the payload of a case."""
    document = json.loads(data)
    payload = document["payload"]
    part = chosen.choice(("traces", "traces", "plans", "plans", "storages", "weights", "methods", ""))
    chosen.choice((exchange, mutate_tree))(chosen, payload.get(part) or payload)
    return json.dumps(document).encode()


def change_graph(chosen, data):
    """Changes the stored graph of a case: an operator, values of it, or bytes."""
    document = json.loads(data)
    code = document["code"]
    if isinstance(code, str) or chosen.random() < 0.1:
        text = code if isinstance(code, str) else json.dumps(code)
        document["code"] = mutate_bytes(chosen, text.encode("latin-1")).decode("latin-1")
        return json.dumps(document).encode()
    calls = [row for row in _nodes(code) if isinstance(row, list) and row[:1] == ["call_function"]]
    what = chosen.randrange(4)
    if what == 0 and calls:
        row = chosen.choice(calls)
        row[2:3] = [chosen.choice(OPERATORS)]
    elif what < 3 and calls:
        (exchange if what == 1 else mutate_tree)(chosen, calls)
    else:
        mutate_tree(chosen, code)
    return json.dumps(document).encode()


def _nodes(code):
    """The nodes of a stored method, if it still has a graph."""
    graph = code.get("graph") if isinstance(code, dict) else None
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    return nodes if isinstance(nodes, list) else []
