"""Which modules read which weights: their calls are the steps of a call of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from penstock.integrations.called.facts import ModuleFacts, joined, registered_weights
from penstock.integrations.called.own_memory import OwnMemory
from penstock.integrations.called.places import Places, Step
from penstock.passes.weights.subclasses import plain_tensors

_HOLD_FOR_PARENT = (nn.ParameterList, nn.ParameterDict)
"""Modules that hold parameters and have no forward of their own: the module around them reads these."""

_READ_THEIR_PARTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Layers of torch.nn whose forward reads the weights of the modules inside, without calling them."""

COMPILED = "_compiled_call_impl"
"""What a call of a module runs once its `compile()` was called."""

_SMALL_SHARE, _SMALL_BYTES = 0.01, 4096
"""Weights of a module with readers inside stay in memory up to this share of all weights, or these bytes.

Class tokens and small tables are such. Larger ones are read from their file by each operator that asks for
them.
"""


@dataclass
class Learned:
    """What calls have shown of a module.

    Attributes:
        reads: By FQN, the paths of modules that read a weight which is registered in another module.
        resident: Storages that stay in memory, because something writes them or keeps views of them.
        small: Storages that stay in memory, because other weights of their modules are read by units.
        backward: By the name of a step of a backward, the storages that it reads.
        vectors_stay: Weights of one dimension stay in memory.
    """

    reads: dict[str, set[str]] = field(default_factory=dict)
    resident: set[int] = field(default_factory=set)
    small: set[int] = field(default_factory=set)
    backward: dict[str, tuple[int, ...]] = field(default_factory=dict)
    vectors_stay: bool = False


@dataclass(frozen=True)
class Readers:
    """The modules whose calls are steps.

    Attributes:
        fqns: By path, the names of the weights that a step reads.
        storages: By path, the storages of these weights that a plan moves, ascending.
        resident: Storages that stay in memory, because a module with readers inside reads them.
    """

    fqns: Mapping[str, tuple[str, ...]]
    storages: Mapping[str, tuple[int, ...]]
    resident: frozenset[int]


class StepWeights:
    """Which weights the steps of a module read; `find` is called before anything else.

    Attributes:
        own: What reads weights from their files, with the facts of the module.
        places: The places of its weights.
        learned: What calls have shown of it.
        readers: The modules whose calls are steps.
        steps: The steps, by path.
    """

    readers: Readers
    steps: dict[str, Step]

    def __init__(self, module: nn.Module, own_memory: OwnMemory, places: Places) -> None:
        self.own, self.places, self.learned = own_memory, places, Learned()
        self._module = module

    def find(self) -> None:
        """Find the readers and the steps, with what calls have shown so far."""
        self.readers = find_readers(self._module, self.facts, self.learned)
        reads = self.learned.reads
        self.steps = {
            path: self.places.step(path, fqns, [fqn for fqn in fqns if path in reads.get(fqn, ())])
            for path, fqns in self.readers.fqns.items()
        }

    @property
    def facts(self) -> ModuleFacts:
        """The facts of the module; weights that become units of a stack change them."""
        return self.own.facts

    def storages_of(self, twin: int) -> set[int]:
        """Return the storages of a weight."""
        parts = plain_tensors(self.places.names[twin], self.places.twins[twin])
        return {self.facts.parts[name].storage for name in parts}

    def is_read_by(self, path: str, storage: int) -> bool:
        """Tell whether the step of a module reads a storage."""
        return storage in self.readers.storages.get(path, ())

    @property
    def resident(self) -> set[int]:
        """The storages that stay in memory in every plan."""
        return self.learned.resident | self.learned.small | self.readers.resident


def find_readers(module: nn.Module, facts: ModuleFacts, learned: Learned) -> Readers:
    """Return the readers of a module. What is registered in a module is read by its own forward.

    No reader has readers inside, as one step is open at a time.
    """
    modules = dict(module.named_modules())
    readers: dict[str, list[str]] = {}
    storages_of: dict[str, tuple[int, ...]] = {}
    for path, _, key, value in registered_weights(module):
        fqn = joined(path, key)
        if not all(name in facts.parts for name in plain_tensors(fqn, value)):
            continue  # a part that has come since: it is in memory
        storages_of[fqn] = tuple(facts.parts[name].storage for name in plain_tensors(fqn, value))
        readers.setdefault(_reader_of(path, modules), []).append(fqn)
    resident: set[int] = set()
    if learned.vectors_stay:
        resident |= {part.storage for part in facts.parts.values() if len(part.shape) < 2}
    small = max(_SMALL_SHARE * facts.nbytes, _SMALL_BYTES)
    for path in [path for path in readers if not can_read(path, readers)]:
        storages = {s for fqn in readers.pop(path) for s in storages_of[fqn]}
        if sum(facts.storages[s].nbytes for s in storages) <= small:
            resident |= storages
    for fqn, paths in learned.reads.items():
        for path in paths if fqn in storages_of else ():
            if can_read(path, readers):
                readers.setdefault(path, []).append(fqn)
    moved = {
        path: tuple(sorted({s for fqn in fqns for s in storages_of[fqn]} - resident - learned.resident))
        for path, fqns in readers.items()
    }
    for step, reads in learned.backward.items():
        moved[step] = tuple(s for s in reads if s not in resident | learned.resident)
    return Readers(
        {
            path: tuple(dict.fromkeys(readers[path]))
            for path, storages in moved.items()
            if storages and path in readers
        },
        {path: storages for path, storages in moved.items() if storages},
        frozenset(resident),
    )


def is_compiled(module: nn.Module) -> bool:
    """Tell whether the user has compiled a module: its parts then run in one piece of code."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _reader_of(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the module whose step reads the parameters that are registered at `path`."""
    while path and isinstance(modules[path], _HOLD_FOR_PARENT):
        path = path.rpartition(".")[0]
    reader = path
    while path:
        path = path.rpartition(".")[0]
        if isinstance(modules[path], _READ_THEIR_PARTS) or is_compiled(modules[path]):
            reader = path
    return reader


def can_read(path: str, readers: Collection[str]) -> bool:
    """Tell whether the module at `path` may be a step: it has no other reader inside."""
    return not any(other != path and (not path or other.startswith(f"{path}.")) for other in readers)
