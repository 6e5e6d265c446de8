"""Lists of modules that are alike, of which values choose: their weights become the units of stacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from penstock.integrations.called.by_units.reads import Seen
from penstock.integrations.called.facts import ModuleFacts
from penstock.integrations.called.readers import sibling_lists, structure_of
from penstock.schedule.facts.catalog import part_nbytes
from penstock.schedule.sparse.division import LEAST, LEAST_UNIT

_SMALL = 0.05
"""Weights of modules in a list stay in memory, where they are at most this share of those that are units."""


class Siblings:
    """The lists of a module whose parts are alike.

    Args:
        module: The module.
        facts: Its facts.
        uses: By storage, the number of weights in it.
        is_watched: Tells whether a storage is read by units already.
    """

    def __init__(
        self,
        module: nn.Module,
        facts: ModuleFacts,
        uses: Mapping[int, int],
        is_watched: Callable[[int], bool],
    ) -> None:
        self.facts, self.lists = facts, sibling_lists(module)
        self._module, self._uses, self._is_watched = module, uses, is_watched

    def chosen(self, entry: str, steps: Sequence[Seen]) -> list[str]:
        """Return the lists of modules of which a pass has chosen some by values, and lists like those.

        In such a list a pass leaves modules out that are not the last ones, or calls them in another order.
        """
        found: set[object] = set()
        inside = f"{entry}." if entry else ""
        for path, names in self.lists.items():
            if not f"{path}.".startswith(inside):
                continue
            numbers: list[int] = []
            for one in steps:
                if one.owner.startswith(f"{path}."):
                    number = names.index(one.owner[len(path) + 1 :].partition(".")[0])
                    if not numbers or numbers[-1] != number:
                        numbers.append(number)
            last = -1
            for number in numbers:
                if number not in (0, last + 1):
                    found.add(self._like(path))
                last = number
        return [path for path in self.lists if self._like(path) in found and self.groups(path) is not None]

    def groups(self, path: str) -> tuple[list[list[str]], set[int]] | None:
        """Return the weights of a list that become one storage each, and storages too small for that.

        None where the small ones, which then stay in memory, are more than a few hundredths.
        """
        groups: list[list[str]] = []
        small: set[int] = set()
        names, nbytes = self.lists[path], 0
        for name, value in self._module.get_submodule(f"{path}.{names[0]}").named_parameters():
            fqns = [f"{path}.{one}.{name}" for one in names]
            if self._may_stack(fqns):
                groups.append(fqns)
                nbytes += value.nbytes * len(names)
            else:
                small |= {self.facts.parts[part].storage for fqn in fqns for part in self._parts_of(fqn)}
        rest = sum(self.facts.storages[s].nbytes for s in small)
        return (groups, small) if groups and rest <= _SMALL * nbytes else None

    def _parts_of(self, fqn: str) -> list[str]:
        return [name for name in self.facts.parts if name == fqn or name.startswith(f"{fqn}.")]

    def _like(self, path: str) -> object:
        return structure_of(self._module.get_submodule(f"{path}.{self.lists[path][0]}")), len(
            self.lists[path]
        )

    def _may_stack(self, fqns: Sequence[str]) -> bool:
        parts = [self.facts.parts.get(fqn) for fqn in fqns]
        if any(part is None for part in parts):
            return False
        storages = [self.facts.storages[part.storage] for part in parts if part is not None]
        alone = all(
            self._uses[part.storage] == 1 and not self._is_watched(part.storage) for part in parts if part
        )
        first, one = storages[0], parts[0]
        assert one is not None
        same = all((s.nbytes, s.phase, s.kind) == (first.nbytes, first.phase, "streamable") for s in storages)
        large = first.nbytes >= LEAST_UNIT and first.nbytes * len(fqns) >= LEAST
        return alone and same and large and one.offset == 0 and part_nbytes(one) == first.nbytes
