"""Runs a lowered program with a streamer that poisons every weight outside its reads."""

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from penstock.passes.annotate import annotate_with_values
from penstock.passes.graph.nodes import copy_graph_module, exported_device, move_graph, nested_modules
from penstock.passes.lowering import eager
from penstock.passes.weights.lifted import Catalog, Weights
from penstock.schedule.payload.codec import Payload, ProgramFile


class PoisoningStreamer:
    """Keeps a copy of every storage; what streams is 0xff bytes except between acquire and release."""

    def __init__(self, annotated):
        self.payload = annotated.payload
        self.buffers = [
            _copy_of(value, s.nbytes)
            for value, s in zip(annotated.values, self.payload.storages, strict=True)
        ]
        self.values = [buffer.clone() for buffer in self.buffers]
        self.log = []
        for index, storage in enumerate(self.payload.storages):
            if storage.kind == "streamable":
                self.buffers[index].fill_(0xFF)

    def acquire(self, graph, step):
        self.log.append(("acquire", graph, step))
        for read in self.payload.trace_for(graph).steps[step].reads:
            self.buffers[read].copy_(self.values[read])

    def release(self, graph, step):
        self.log.append(("release", graph, step))
        for read in self.payload.trace_for(graph).steps[step].reads:
            assert torch.equal(self.buffers[read], self.values[read]), "a step wrote to a streamable weight"
            self.buffers[read].fill_(0xFF)

    def tensors(self):
        return {w.fqn: _view(self.buffers[w.parts[0].storage], w.parts[0]) for w in self.payload.weights}


def export(case, *, strict=False, decomposed=False):
    """Builds the model and exports it; the model returned shares nothing that a run may change."""
    torch.manual_seed(0)
    model = case.build().train(case.train)
    args, kwargs = case.args(), case.kwargs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what export itself says of these models is not under test
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=case.dynamic_shapes, strict=strict)
    if decomposed:
        exported = decompose(exported, {})
    return model, exported


def retarget(graph_module, device):
    """A copy of the graph in which the device that it was exported for is `device`."""
    copied = copy_graph_module(graph_module)
    if move_graph(copied.graph, nested_modules(copied)[1:], exported_device(graph_module), device):
        copied.recompile()
    return copied


def decompose(exported, table):
    """Decomposes with `table`, torch's own for None, without what torch warns of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return exported.run_decompositions(table)


def stored(annotated, *, trust=False):
    """Saves the programs and loads them again, as an artifact does."""
    with tempfile.TemporaryDirectory() as folder:
        name = eager.save(annotated, Path(folder))
        payload = replace(annotated.payload, lowering="eager", program=ProgramFile(name, "0" * 64))
        return eager.load(Path(folder), Payload.from_bytes(payload.to_bytes()), trust=trust)


def prepare(exported, *, trust=False):
    annotated = annotate_with_values(exported)
    return stored(annotated, trust=trust), PoisoningStreamer(annotated)


def same_bits(got, expected):
    """Whether two results are the same tree with the same bits in every tensor."""
    got_leaves, got_tree = pytree.tree_flatten(got)
    leaves, tree = pytree.tree_flatten(expected)
    return got_tree == tree and all(_same_leaf(*pair) for pair in zip(got_leaves, leaves, strict=True))


def _same_leaf(got, expected):
    if not isinstance(expected, torch.Tensor):
        return type(got) is type(expected) and got == expected
    got, expected = got.detach().contiguous(), expected.detach().contiguous()
    alike = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return alike and torch.equal(got.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


def weights_of(exported):
    catalog = Catalog()
    return Weights(catalog.add(exported), catalog.storages)


def _copy_of(value, nbytes):
    raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage(), 0, (nbytes,))
    return raw.clone()


def _view(buffer, part):
    dtype = getattr(torch, part.dtype)
    return torch.empty(0, dtype=dtype).set_(
        buffer.untyped_storage(), part.offset // dtype.itemsize, part.shape, part.stride
    )
