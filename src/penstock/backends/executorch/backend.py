"""The backend: all regions of all methods in, one payload, their code and the bytes of their weights out."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from penstock.backends.executorch.code import METHOD, compile_methods, region_program, text_of
from penstock.backends.executorch.facts import (
    Facts,
    RegionProgram,
    as_torch_exports,
    find_facts,
    named_without_use,
)
from penstock.backends.executorch.files import PAYLOAD, PROGRAM, STORAGE, Appended, RegionCode
from penstock.backends.executorch.options import MethodFacts, RegionFacts, Settings, from_specs, settings_of
from penstock.backends.executorch.plans import BLOCK, make_plans
from penstock.backends.executorch.regions import dim_order_of
from penstock.passes.graph.nodes import with_aten_operators
from penstock.passes.weights.lifted import has_values, storage_bytes
from penstock.runtime.planning import kept_storages
from penstock.schedule.facts.errors import PassError
from penstock.schedule.facts.model import Extent, Method, Storage, WeightFile

_PIECE = 16 << 20


class StorageBytes(FileBackedData):  # type: ignore[misc]
    """The bytes behind a tensor, as ExecuTorch takes them: written from where they lie, and never copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = storage_bytes(tensor.detach().cpu()).numpy().data
        digest = hashlib.sha256()
        for start in range(0, len(self._bytes), _PIECE):
            digest.update(self._bytes[start : start + _PIECE])
        self._digest = digest.digest()

    def __len__(self) -> int:
        return len(self._bytes)

    def prefix(self, size: int) -> bytes:
        """The first bytes."""
        return bytes(self._bytes[:size])

    def sha256(self) -> bytes:
        """The hash of all bytes."""
        return self._digest

    def to_bytes(self) -> bytes:
        """A copy of all bytes, which ExecuTorch's own writers do not ask for."""
        return bytes(self._bytes)

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        """Writes all bytes."""
        outfile.write(self._bytes)

    def close(self) -> None:
        """Does nothing: the bytes belong to the tensor."""


def hashed_key(prefix: str, data: bytes) -> str:
    """The key of bytes, which has their hash."""
    return prefix + hashlib.sha256(data).hexdigest()


def add_storages(
    store: NamedDataStore,
    storages: Sequence[Storage],
    values: Sequence[torch.Tensor],
    data_file: str,
    block: int,
) -> tuple[tuple[Storage, ...], tuple[WeightFile, ...]]:
    """Adds the bytes of storages to what the `.ptd` will hold; returns where they lie.

    If a storage has no values, none is added. A state that begins as zeros is not stored.
    """
    if not all(has_values(value) for value in values):
        return tuple(storages), ()
    files: dict[str, WeightFile] = {}
    numbers: dict[str, int] = {}
    placed = []
    for storage, value in zip(storages, values, strict=True):
        if not storage.nbytes or (storage.kind == "mutable" and not storage_bytes(value).any()):
            placed.append(storage)
            continue
        data = StorageBytes(value)
        digest = data.sha256().hex()
        key = STORAGE + digest
        if key not in files:
            store.add_named_data(key, data, alignment=block, external_tag=data_file)
            files[key] = WeightFile(data_file, len(data), 0, 0, "", "", "named", key)
        extent = Extent(numbers.setdefault(key, len(numbers)), 0, 0, storage.nbytes)
        placed.append(replace(storage, extents=(extent,), sha256=digest))
    return tuple(placed), tuple(files.values())


class PenstockBackend(BackendDetails):  # type: ignore[misc]
    """What ExecuTorch calls with all that was tagged for penstock. `PenstockPartitioner` names it."""

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """Returns the program itself: nothing here changes it, and a deep copy would copy its weights."""
        return edge_program

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """The only region of the method `forward`."""
        results = PenstockBackend.preprocess_multimethod({METHOD: [edge_program]}, {METHOD: [compile_specs]})
        return results[METHOD][0]

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Returns the delegates of all regions; the first one carries the named data of all.

        ExecuTorch gives the regions of a method in the order in which it runs them. Raises PassError for a
        region without weights or with a compile spec that is not penstock's, and BudgetError for a budget
        below the floor.
        """
        settings = settings_of([spec for specs in compile_specs.values() for spec in specs])
        regions = _regions(edge_programs, compile_specs)
        methods = {name: _method_facts(specs) for name, specs in compile_specs.items()}
        store = NamedDataStore()
        facts, codes = _lower(store, edge_programs, regions, methods, settings)
        storages, files = add_storages(store, facts.payload.storages, facts.values, settings.data_file, BLOCK)
        payload = replace(facts.payload, storages=storages, files=files)
        plans, budget = make_plans(payload, kept_storages(payload, settings.keep), settings)
        data = replace(payload, plans=plans).to_bytes()
        key = hashed_key(PAYLOAD, data)
        store.add_named_data(key, data)
        results: dict[str, list[PreprocessResult]] = {name: [] for name in edge_programs}
        for region in regions:
            edge = edge_programs[region.method][region.number]
            taken = facts.takes.get(region.name, Method(region.method, 0, ()))
            code = RegionCode(
                format="penstock-region",
                version=2,
                payload=key,
                graph=next(m.graph for m in payload.methods if m.name == region.method),
                region=region.number,
                regions=len(edge_programs[region.method]),
                steps=facts.steps[region.name],
                budget=budget,
                kernels=settings.kernels,
                program=codes[region.name],
                method=METHOD if settings.kernels == "executorch" else region.method,
                inputs=len(edge.graph_signature.user_inputs),
                outputs=len(edge.graph_signature.user_outputs),
                takes=taken.inputs,
                symbols=taken.symbols,
                appended=_appended(edge, facts, region),
            )
            results[region.method].append(PreprocessResult(processed_bytes=code.to_bytes()))
        first = next(iter(results.values()))[0]
        first.data_store_output = store.get_named_data_store_output()
        return results


def _lower(
    store: NamedDataStore,
    edge_programs: Mapping[str, Sequence[ExportedProgram]],
    regions: Sequence[RegionProgram],
    methods: Mapping[str, MethodFacts],
    settings: Settings,
) -> tuple[Facts, dict[str, str]]:
    """The facts of all regions, and the keys of their code by the names of regions."""
    if settings.kernels == "executorch":
        return find_facts(regions, methods, settings), _add_programs(store, edge_programs)
    for region in regions:
        as_torch_exports(region.program)
    facts, code = compile_methods(regions, methods, settings)
    assert facts.payload.program is not None
    store.add_named_data(facts.payload.program.path, code)
    return facts, {region.name: facts.payload.program.path for region in regions}


def _regions(
    programs: Mapping[str, Sequence[ExportedProgram]], specs: Mapping[str, Sequence[Sequence[CompileSpec]]]
) -> list[RegionProgram]:
    regions = []
    for method, of_method in programs.items():
        for number, (program, spec) in enumerate(zip(of_method, specs[method], strict=True)):
            facts = from_specs(spec).get(RegionFacts, RegionFacts())
            assert isinstance(facts, RegionFacts)
            region = copy.copy(with_aten_operators(program))
            region._guards_code = []  # those of its method, whose inputs have other names
            regions.append(RegionProgram(method, number, region, facts))
    return regions


def _method_facts(specs: Sequence[Sequence[CompileSpec]]) -> MethodFacts:
    method_facts = [
        facts for spec in specs for facts in from_specs(spec).values() if isinstance(facts, MethodFacts)
    ]
    return method_facts[0] if method_facts else MethodFacts()


def _add_programs(store: NamedDataStore, programs: Mapping[str, Sequence[ExportedProgram]]) -> dict[str, str]:
    """Adds the code of all regions to what the `.pte` will hold; returns its keys by the names of regions."""
    keys: dict[str, str] = {}
    key_of: dict[str, str] = {}
    for method, of_method in programs.items():
        for number, program in enumerate(of_method):
            text = text_of(program)
            if text not in key_of:
                code = region_program(program)
                key_of[text] = hashed_key(PROGRAM, code)
                store.add_named_data(key_of[text], code, alignment=BLOCK)
            keys[f"{method}_{number}"] = key_of[text]
    return keys


def _appended(edge: ExportedProgram, facts: Facts, region: RegionProgram) -> tuple[Appended, ...]:
    """The weights and states of a region, in the order of its program's inputs."""
    signature = edge.graph_signature
    written = [spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION]
    inputs = []
    for spec in signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            continue
        names = (str(spec.target), f"{region.name}.{spec.target}", f"{region.method}.{spec.target}")
        weight = next(facts.tensors[name] for name in names if name in facts.tensors)
        part = weight.parts[0]
        order = dim_order_of(part)
        if order is None:
            raise PassError(
                f"weight {weight.fqn!r} has gaps between its elements, which no tensor of ExecuTorch can "
                "have: make it contiguous before the export"
            )
        inputs.append(
            Appended(
                storage=part.storage,
                offset=part.offset,
                dtype=part.dtype,
                shape=part.shape,
                dim_order=order,
                name=named_without_use(weight.fqn),
                mutable=spec.target in written,
            )
        )
    return tuple(inputs)
