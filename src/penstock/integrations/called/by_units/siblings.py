"""Lists of modules that are alike, of which values choose: their weights become the units of stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.own_memory import OwnMemory
from penstock.integrations.called.readers import is_compiled
from penstock.schedule.facts.model import part_nbytes
from penstock.schedule.sparse.pool import LEAST, LEAST_UNIT

_SMALL = 0.05
"""Weights of modules in a list stay in memory, where they are at most this share of those that are units."""


class Siblings:
    """The lists of a module whose parts are alike.

    Args:
        module: The module.
        own: What reads its weights, with its facts.
        uses: By storage, the number of weights in it.
        is_watched: Tells whether a storage is read by units already.
    """

    def __init__(
        self,
        module: nn.Module,
        own_memory: OwnMemory,
        uses: Mapping[int, int],
        is_watched: Callable[[int], bool],
    ) -> None:
        self._own, self.lists = own_memory, _sibling_lists(module)
        self._module, self._uses, self._is_watched = module, uses, is_watched

    def chosen(self, method: str, steps: Sequence[Seen]) -> list[str]:
        """Return the lists of modules of which a pass has chosen some by values, and lists like those.

        In such a list a pass leaves modules out that are not the last ones, or calls them in another order.
        """
        chosen: set[object] = set()
        inside = f"{method}." if method else ""
        for path, names in self.lists.items():
            if not f"{path}.".startswith(inside):
                continue
            numbers: list[int] = []
            for step in steps:
                if step.owner.startswith(f"{path}."):
                    number = names.index(step.owner[len(path) + 1 :].partition(".")[0])
                    if not numbers or numbers[-1] != number:
                        numbers.append(number)
            last = -1
            for number in numbers:
                if number not in (0, last + 1):
                    chosen.add(self._like(path))
                last = number
        return [path for path in self.lists if self._like(path) in chosen and self.groups(path) is not None]

    def groups(self, path: str) -> tuple[list[list[str]], set[int]] | None:
        """Return the weights of a list that become one storage each, and storages too small for that.

        None where the small ones, which then stay in memory, are more than a few hundredths.
        """
        groups: list[list[str]] = []
        small: set[int] = set()
        names, nbytes = self.lists[path], 0
        for name, value in self._module.get_submodule(f"{path}.{names[0]}").named_parameters():
            fqns = [f"{path}.{part}.{name}" for part in names]
            if self._may_stack(fqns):
                groups.append(fqns)
                nbytes += value.nbytes * len(names)
            else:
                small |= {self._own.facts.parts[part].storage for fqn in fqns for part in self._parts_of(fqn)}
        small_bytes = sum(self._own.facts.storages[s].nbytes for s in small)
        return (groups, small) if groups and small_bytes <= _SMALL * nbytes else None

    def _parts_of(self, fqn: str) -> list[str]:
        return [name for name in self._own.facts.parts if name == fqn or name.startswith(f"{fqn}.")]

    def _like(self, path: str) -> object:
        return _structure_of(self._module.get_submodule(f"{path}.{self.lists[path][0]}")), len(
            self.lists[path]
        )

    def _may_stack(self, fqns: Sequence[str]) -> bool:
        if not all(fqn in self._own.facts.parts for fqn in fqns):
            return False
        parts = [self._own.facts.parts[fqn] for fqn in fqns]
        storages = [self._own.facts.storages[part.storage] for part in parts]
        alone = all(self._uses[p.storage] == 1 and not self._is_watched(p.storage) for p in parts)
        first = storages[0]
        same = all((s.nbytes, s.phase, s.kind) == (first.nbytes, first.phase, "streamable") for s in storages)
        large = first.nbytes >= LEAST_UNIT and first.nbytes * len(fqns) >= LEAST
        return alone and same and large and parts[0].offset == 0 and part_nbytes(parts[0]) == first.nbytes


def _sibling_lists(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the lists of modules that have equal parts, by path: the names of the modules in them."""
    lists: dict[str, tuple[str, ...]] = {}
    for path, parts in module.named_modules():
        if isinstance(parts, nn.ModuleList | nn.ModuleDict) and len(parts) > 1:
            structures = {_structure_of(part) for part in parts.children()}
            compiled = any(map(is_compiled, parts.modules()))
            if len(structures) == 1 and not compiled and next(iter(structures))[1]:
                lists[path] = tuple(parts._modules)
    return lists


def _structure_of(module: nn.Module) -> tuple[type, tuple[object, ...]]:
    """Return what siblings have in common: the class, and the geometries of the weights."""
    named = module.named_parameters(remove_duplicate=False)
    return type(module), tuple((name, value.shape, value.stride(), value.dtype) for name, value in named)
