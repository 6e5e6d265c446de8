"""The process groups of a program with collectives.

Its graph names groups, and may hold numbers of the rank that exported it. So it runs on that rank, in a world
of that size, with groups of the same ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._ops import OpOverload

from penstock.passes.calls.inputs import refuse
from penstock.schedule.facts.errors import PassError, PayloadError

_NAMESPACES = frozenset(("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"))


@dataclass(frozen=True)
class Ranks:
    """The rank of a process, the size of its world, and by name the ranks of the groups in a program."""

    rank: int
    world: int
    groups: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(graphs: Iterable[fx.Graph]) -> Ranks | None:
        """Return those of this process for the groups that graphs name; None for graphs without collectives.

        Raises PassError if this process is in no process group, or has none of a name.
        """
        nodes = [node for graph in graphs for node in graph.nodes if is_collective(node.target)]
        if not nodes:
            return None
        if not _is_initialized():
            raise PassError(
                f"the program calls {nodes[0].target}, and this process is in no process group: call "
                "torch.distributed.init_process_group() first, since the program is compiled for one rank"
            )
        names = {name for node in nodes for name in _groups(node)}
        groups = {name: _ranks_of(name) for name in sorted(names)}
        for name, ranks in groups.items():
            if not ranks:
                raise PassError(
                    f"the program calls collectives of the process group {name!r}, which this process does "
                    "not have: make its groups before it is compiled, as before its export"
                )
        return Ranks(dist.get_rank(), dist.get_world_size(), groups)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Ranks:
        """Read what `to_bytes` wrote. Raises PassError for anything else."""
        try:
            stored = json.loads(data)
        except (ValueError, RecursionError):
            refuse(data[:80], "JSON")
        groups = stored.get("groups") if isinstance(stored, dict) else None
        if not isinstance(groups, dict) or stored.keys() != {"rank", "world", "groups"}:
            refuse(stored, "record of ranks")
        lists = groups.values()
        numbers = [
            stored["rank"],
            stored["world"],
            *(n for numbers in lists if isinstance(numbers, list) for n in numbers),
        ]
        if not all(isinstance(numbers, list) for numbers in lists) or any(
            type(n) is not int for n in numbers
        ):
            refuse(stored, "record of ranks")
        return Ranks(stored["rank"], stored["world"], {name: tuple(ranks) for name, ranks in groups.items()})

    def check_here(self, source: str) -> None:
        """Raise PayloadError unless this process is the rank, and has the groups, that `source` is for."""
        was = f"{source} calls collectives and was compiled by rank {self.rank} of {self.world}"
        if not _is_initialized():
            raise PayloadError(
                f"{was}, and this process is in no process group: call "
                f"torch.distributed.init_process_group() as rank {self.rank} of {self.world} first"
            )
        rank, world = dist.get_rank(), dist.get_world_size()
        if (rank, world) != (self.rank, self.world):
            raise PayloadError(
                f"{was}, and this process is rank {rank} of {world}: open what this rank has compiled, or "
                "compile the program on each rank, into a folder of its own"
            )
        for name, ranks in self.groups.items():
            if (here := _ranks_of(name)) != ranks:
                raise PayloadError(
                    f"{was}, where the process group {name!r} had the ranks {list(ranks)}, and here it has "
                    f"{list(here) or 'none'}: make the same groups in the same order before it is opened"
                )


def is_collective(target: Any) -> bool:
    """Tells whether an operator waits for other ranks: it is one of torch's, or takes a group by name."""
    return isinstance(target, OpOverload) and (
        target.namespace in _NAMESPACES
        or any(argument.name == "group_name" for argument in target._schema.arguments)
    )


def _groups(node: fx.Node) -> Iterable[str]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    arguments_given = (
        dict(zip((argument.name for argument in arguments), node.args, strict=False)) | node.kwargs
    )
    return [
        name for key, name in arguments_given.items() if key.startswith("group") and isinstance(name, str)
    ]


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks_of(name: str) -> tuple[int, ...]:
    """The ranks of a process group; none where this process has no group of that name."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    try:
        return tuple(dist.get_process_group_ranks(resolve(name)))
    except RuntimeError:
        return ()
