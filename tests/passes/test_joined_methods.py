"""Methods that were annotated apart become the program that they are when they are annotated together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.passes.annotate import annotate, annotate_with_values
from penstock.passes.joining import join_methods
from penstock.schedule.facts.errors import PassError
from tests.passes.test_annotate import Look, Update, two_methods


def joined(programs):
    return join_methods({name: annotate_with_values({name: one}) for name, one in programs.items()})


def test_methods_are_what_they_are_together_and_what_one_writes_streams_in_none():
    _, _, programs = two_methods()
    together, apart = annotate(programs), joined(programs).payload
    assert apart == together
    assert [[step.reads for step in trace.steps] for trace in apart.traces] == [[(0, 1)], [(0, 1), (3, 4)]]


def test_the_values_are_those_of_the_storages():
    look, update, programs = two_methods()
    found = joined(programs)
    storages = [weight.parts[0].storage for weight in found.payload.weights]
    names = [weight.fqn for weight in found.payload.weights]
    values = {**look.state_dict(keep_vars=True), **update.state_dict(keep_vars=True)}
    assert [found.values[s].data_ptr() for s in storages] == [values[name].data_ptr() for name in names]
    assert list(found.programs) == list(found.propagated) == ["look", "update"]


def test_weights_of_one_name_that_differ_are_refused():
    x = torch.randn(2, 8)
    wide, narrow = (torch.export.export(nn.Linear(8, n), (x,)) for n in (8, 4))
    with pytest.raises(PassError, match="two methods have weights called 'weight' that differ"):
        joined({"wide": wide, "narrow": narrow})


def test_weights_that_share_memory_in_one_method_only_are_refused():
    x, shared = torch.randn(2, 8), nn.Linear(8, 8)
    tied, apart = (Look(shared, state) for state in (shared.bias.detach(), torch.zeros(8)))
    programs = {"apart": torch.export.export(apart, (x,)), "tied": torch.export.export(tied, (x,))}
    with pytest.raises(PassError, match=r"shared\.bias, state share their memory in one method and not in"):
        joined(programs)


def test_a_storage_is_as_large_as_the_method_that_has_most_of_it():
    x, base = torch.randn(2, 8), torch.zeros(64)
    look = Look(nn.Linear(8, 8), base[:8])
    update = Update(look.shared, base[:8])
    annotated = {
        name: annotate_with_values({name: torch.export.export(one, (x,))})
        for name, one in {"look": look, "update": update}.items()
    }
    state = next(w for w in annotated["look"].payload.weights if w.fqn == "state").parts[0].storage
    storages = list(annotated["look"].payload.storages)
    storages[state] = replace(storages[state], nbytes=32)
    small = replace(annotated["look"].payload, storages=tuple(storages))
    payload = join_methods({**annotated, "look": replace(annotated["look"], payload=small)}).payload
    state = next(weight for weight in payload.weights if weight.fqn == "state").parts[0].storage
    assert (payload.storages[state].nbytes, payload.storages[state].kind) == (256, "mutable")


class Lookup(nn.Module):
    """Rows of a table that the other method has as its second weight."""

    def __init__(self, table, own):
        super().__init__()
        self.own, self.table = own, table

    def forward(self, x, ids):
        return self.own(x) + nn.functional.embedding(ids, self.table)


class Other(nn.Module):
    def __init__(self, table, more):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.more, self.table = more, table

    def forward(self, x, ids):
        return self.more(x) * self.scale + self.table[ids]


def test_reads_by_units_name_the_storages_that_joined_methods_have():
    table = nn.Parameter(torch.randn(16, 8))
    x, ids = torch.randn(3, 8), torch.tensor([3, 1, 3])
    methods = {"look": Lookup(table, nn.Linear(8, 8)), "other": Other(table, nn.Linear(8, 8))}
    programs = {name: torch.export.export(one, (x, ids)) for name, one in methods.items()}
    apart, together = joined(programs).payload, annotate(programs)
    assert apart == together
    storage = next(one.parts[0].storage for one in apart.weights if one.fqn == "table")
    reads = [one for trace in apart.traces for step in trace.steps for one in step.sparse]
    assert [(one.operator, one.storage, one.count) for one in reads] == [
        ("aten.embedding.default", storage, 16),
        ("aten.index.Tensor", storage, 16),
    ]
    alone = joined({"other": programs["other"]}).payload
    (read,) = (one for step in alone.traces[0].steps for one in step.sparse)
    assert read.storage != storage


class Writes(nn.Module):
    """Writes the table that the other method reads by units."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x, ids):
        self.table.add_(1)
        return x + self.table[0, 0]


class Reads(nn.Module):
    def __init__(self, table, own):
        super().__init__()
        self.own = own
        self.register_buffer("table", table)

    def forward(self, x, ids):
        return self.own(x) + self.table[ids]


def test_what_another_method_writes_is_not_read_by_units():
    table = torch.randn(16, 8)
    x, ids = torch.randn(3, 8), torch.tensor([3, 1, 3])
    methods = {"look": Reads(table, nn.Linear(8, 8)), "write": Writes(table)}
    programs = {name: torch.export.export(one, (x, ids)) for name, one in methods.items()}
    apart = joined(programs).payload
    assert apart == annotate(programs)
    assert [one for trace in apart.traces for step in trace.steps for one in step.sparse] == []
