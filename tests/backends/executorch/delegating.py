"""Runs what was exported as a delegate does, in Python: ExecuTorch's kernels over the bytes of the `.ptd`."""

import operator
from dataclasses import dataclass, field

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from torch import fx

from penstock.backends.executorch import Exported
from penstock.backends.executorch.files import RegionCode


@dataclass
class Delegates:
    """The delegates of one loaded program, which share states. `seen` has the regions that ran."""

    exported: Exported
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    seen: list[tuple[int, int]] = field(default_factory=list)

    def storage(self, index):
        storage = self.exported.payload.storages[index]
        if index in self.states:
            return self.states[index]
        raw = torch.zeros(storage.nbytes, dtype=torch.uint8)
        for extent in storage.extents:
            path, offset = self.exported.places[self.exported.payload.files[extent.file].key]
            with path.open("rb") as file:
                file.seek(offset + extent.file_offset)
                read = torch.frombuffer(bytearray(file.read(extent.nbytes)), dtype=torch.uint8)
            raw[extent.storage_offset : extent.storage_offset + extent.nbytes] = read
        if storage.kind == "mutable":
            self.states[index] = raw
        return raw

    def tensor(self, one):
        dtype = getattr(torch, one.dtype)
        stride, dense = [0] * len(one.shape), 1
        for d in reversed(one.dim_order):
            stride[d] = dense
            dense *= max(one.shape[d], 1)
        raw = self.storage(one.storage).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(raw, one.offset // dtype.itemsize, one.shape, stride)

    def run(self, region, inputs):
        assert len(inputs) == region.inputs
        self.seen.append((region.graph, region.region))
        module = _load_for_executorch_from_buffer(self.exported.programs[region.program])
        appended = [self.tensor(one) for one in region.appended]
        results = module.run_method(region.method, (*inputs, *appended))
        outputs = [one.clone() for one in results[sum(one.mutable for one in region.appended) :]]
        assert len(outputs) == region.outputs
        return outputs


class Outer(fx.Interpreter):
    """Runs a lowered program: what is outside of the delegates with ATen, and delegates as `Delegates` do."""

    def __init__(self, lowered, delegates, method="forward"):
        self.program = lowered.exported_program(method)
        super().__init__(self.program.graph_module)
        self.delegates = delegates

    def __call__(self, *inputs):
        given = iter(inputs)
        values = {**self.program.state_dict, **self.program.constants}
        specs = self.program.graph_signature.input_specs
        leaves = [values[spec.target] if spec.target is not None else next(given) for spec in specs]
        with torch.no_grad():
            results = self.run(*leaves)
        return results[0] if len(results) == 1 else results

    def call_function(self, target, args, kwargs):
        if target is executorch_call_delegate:
            return self.delegates.run(RegionCode.from_bytes(args[0].processed_bytes), args[1:])
        if target is operator.getitem:
            return args[0][args[1]]
        return getattr(target, "_op", target)(*args, **kwargs)
