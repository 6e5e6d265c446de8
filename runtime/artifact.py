"""Writes an artifact: `payload.json`, the lowered program, and the weights, packed or used in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.passes.annotate import Annotated, annotate_with_values, by_method
from penstock.passes.graph.nodes import with_aten_operators
from penstock.passes.lowering import eager, inductor
from penstock.passes.weights.lifted import has_values, storage_bytes
from penstock.runtime.checkpoint.binding import (
    Found,
    Rename,
    Rules,
    find_values,
    is_dense,
    with_small_values,
    without,
)
from penstock.runtime.checkpoint.opening import Checkpoint, Paths, open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Slices
from penstock.runtime.files.artifact_files import (
    Progress,
    compare_header,
    count_bytes,
    hash_storage,
    note_seen,
    read_payload,
    replace_payload,
    stamp_file,
    write_payload,
)
from penstock.runtime.files.pack import BLOCK_ALIGNED_FROM, Chunk, PackEntry, tensor_chunks, write_packed
from penstock.runtime.files.safetensors_file import is_safetensors, own_place, reading
from penstock.runtime.module import StreamedModule
from penstock.runtime.planning import find_ladder
from penstock.runtime.program import Program, read_program
from penstock.runtime.program import open as open_program
from penstock.runtime.registered import reads_units_only, write_parameters
from penstock.runtime.system.announcing import announced
from penstock.runtime.system.atomic import write_artifact
from penstock.schedule.bounded_file import hash_bounded
from penstock.schedule.facts.errors import PassError, SourceError
from penstock.schedule.facts.model import (
    ALIGNMENT,
    Extent,
    Method,
    Part,
    Storage,
    Weight,
    WeightFile,
    part_nbytes,
)
from penstock.schedule.facts.parts import storages_together
from penstock.schedule.facts.sizes import parse_size
from penstock.schedule.payload.codec import Payload, ProgramFile
from penstock.schedule.space.layout import place_in_file

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


def relink(
    path: str | PathLike[str],
    files: Sequence[str | PathLike[str]] = (),
    *,
    progress: Progress | None = None,
    trust: bool = False,
) -> Program:
    """Let the artifact `path` refer to `files`, copies of its weight files, and read it, as `open` does.

    Each of `files` replaces the weight file of its name, or the only weight file; it may also be a folder
    with such files. A weight file that is not replaced is looked for at its recorded path. Every byte of the
    weights is compared with the hash taken at compile time; then paths and stamps are written anew, in one
    step.

    Raises SourceError for a file that is missing or has other bytes, and for an artifact that refers to no
    files in place. The artifact then stays as it was.
    """
    folder = Path(path)
    new_files = [Path(file) for file in files]
    with reading(folder):
        places = [file.resolve() if file.is_dir() else own_place(file) for file in new_files]
        relinked = _relinked(folder, places)
    with reading(folder):
        paths = [file.path for file in relinked.payload.files if Path(file.path).is_absolute()]
        seen = {path: os.stat(path).st_ctime_ns for path in paths}
    relinked.verify(progress)
    replace_payload(folder, relinked.payload)
    note_seen(folder, seen)
    return read_program(folder, trust=trust)


def _relinked(folder: Path, files: Sequence[Path]) -> Program:
    """The program of an artifact over other files, whose sizes and headers are those of its own."""
    payload = read_payload(folder)
    in_place = [file for file in payload.files if Path(file.path).is_absolute()]
    if not in_place:
        raise SourceError(f"{folder} holds its weights itself: there is nothing to relink")
    places = _places(in_place, files)
    stamped = tuple(_stamped(file, places[file.path]) if file in in_place else file for file in payload.files)
    return Program(folder, replace(payload, files=stamped))


def _places(in_place: Sequence[WeightFile], new_files: Sequence[Path]) -> dict[str, Path]:
    names = {file.path: Path(file.path).name for file in in_place}
    places = {path: Path(path) for path in names}
    for place in new_files:
        if not place.exists():
            raise SourceError(f"there is no file or folder {place}")
        if place.is_dir():
            places |= {path: place / name for path, name in names.items() if (place / name).exists()}
            continue
        meant = [path for path, name in names.items() if name == place.name or len(names) == 1]
        if len(meant) != 1:
            problem = "is the name of several weight files" if meant else "is the name of no weight file"
            raise SourceError(f"{place} {problem} of the artifact, which refers to {', '.join(names)}")
        places[meant[0]] = place
    return places


def _stamped(file: WeightFile, place: Path) -> WeightFile:
    """The stamp of a copy of a weight file; SourceError if its size or header differ."""
    stamp = stamp_file(place, recorded_path=str(place))
    compare_header(place, file, stamp)
    return stamp


_log = logging.getLogger(__name__)

WEIGHTS = "weights.safetensors"

Chunks = Callable[[], Iterator[Chunk]]


def compile(
    exported: ExportedProgram | Mapping[str, ExportedProgram] | Annotated,
    path: str | PathLike[str],
    *,
    lowering: str = "eager",
    weights: Paths | None = None,
    rename: Rename = None,
    cast: bool = False,
    slices: Slices | None = None,
    pack: bool = True,
    options: Mapping[str, Any] | None = None,
    resident_below: int | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    ladder: bool = False,
) -> Program:
    """Compile an exported program into the artifact in the folder `path`.

    Weights are packed in the order of their first use, small ones first. The bytes to write are logged.

    Args:
        exported: A program, or several methods `{name: program}`; or the result of `annotate_with_values`.
        path: The folder of the artifact.
        lowering: `"eager"`, or `"inductor"` for code of AOTInductor, which runs with the version of torch,
            and on the kind of processor, that compiled it.
        weights: The checkpoint that has the values: safetensors files, an index, a folder, or what torch.save
            or torch.distributed wrote. Default: the program's own values.
        rename, slices: As for `bind`.
        cast: Convert floating-point tensors of another dtype than their weight's.
        pack: False: refer to the weights where they are. For safetensors; slices that are not rows, and what
            the checkpoint lacks, are packed all the same.
        options: Those of Inductor, as for `torch.compile`.
        resident_below: Compiled weights of fewer bytes stay in memory, without probes. Default: 64 KiB.
        force: Replace an artifact that exists.
        progress: Called with a text, the bytes so far and the bytes of all.
        ladder: Add plans for programs without Python (`Program.write_ladder`), and compute quantised experts
            all at once, since only Python computes them one at a time.

    Returns:
        The program, which is trusted.

    Raises:
        PassError: The program cannot stream, or arguments contradict each other.
        SourceError: The files are not the program's, the artifact exists, or it cannot be written.

    Example:
        >>> program = penstock.compile(exported, "mlp.penstock", force=True)
        >>> program.arenas()[-1]
        'paged'
    """
    _check_lowering(lowering, options, resident_below)
    _check_packing(weights, pack, cast, slices)
    annotated, folder = _annotate(exported, ladder), Path(path)

    def write(checkpoint: Checkpoint) -> None:
        rules = Rules(rename, cast, slices)
        stored = [weight for weight in annotated.payload.weights if weight.role != "value"]
        values = None if weights is None else find_values(stored, checkpoint, rules)
        compiled = _compile(annotated, values, options, resident_below) if lowering == "inductor" else None
        lowered = replace(annotated, payload=compiled.payload) if compiled else annotated
        writer = _Writer(lowered, values, folder, progress, in_place=not pack, mapped=lowering == "eager")

        def build(temporary: Path) -> None:
            catalog = writer.write_weights(temporary)
            checkpoint.check_unchanged()
            code = _save_program(lowered, compiled, temporary)
            payload = replace(catalog, lowering="inductor" if compiled else "eager", program=code)
            plans = find_ladder(temporary, payload) if ladder else ()
            write_payload(replace(payload, plans=plans), temporary)
            if not pack:
                note_seen(temporary, checkpoint.ctimes)

        write_artifact(folder, force=force, build=build)

    with announced(f"compiling {folder}"):
        _open(weights, annotated, rename, pack=pack).read(write)
    return open_program(folder, trust=True)  # this process has just made it


def _annotate(
    exported: ExportedProgram | Mapping[str, ExportedProgram] | Annotated, ladder: bool
) -> Annotated:
    """The facts of programs. Without Python nothing computes experts one at a time."""
    annotated = exported
    if not isinstance(annotated, Annotated):
        programs = {name: with_aten_operators(program) for name, program in by_method(annotated).items()}
        annotated = annotate_with_values(programs, trusts=None if ladder else reads_units_only)
    _check_names(annotated.payload.methods)
    return annotated


def write_weights(annotated: Annotated, folder: Path, weights: Paths | None = None) -> Payload:
    """Writes the weights into a file of `folder`, in the order of their first use, and returns the payload.

    With `weights`, the safetensors files of a checkpoint are used in place, and what they lack is written.
    Raises SourceError for files that do not belong to the program, PassError for weights without values.
    """
    checkpoint = _open(weights, annotated, None, pack=False)
    values = None if weights is None else find_values(annotated.payload.weights, checkpoint, Rules(None))
    writer = _Writer(annotated, values, folder, None, in_place=weights is not None, mapped=False)
    return writer.write_weights(folder)


def _save_program(annotated: Annotated, compiled: inductor.Compiled | None, folder: Path) -> ProgramFile:
    if annotated.training is not None:
        digest = write_parameters(annotated.trained, folder)
        annotated = replace(annotated, training=replace(annotated.training, sha256=digest))
    if compiled is None:
        programs, machine = eager.save(annotated, folder), ""
    else:
        programs, machine = inductor.save(compiled, annotated, folder), compiled.machine
    return ProgramFile(programs, hash_bounded(folder / programs, "a lowered program"), machine)


def _check_packing(weights: Paths | None, pack: bool, cast: bool, slices: Slices | None) -> None:
    if not pack and weights is None:
        raise PassError("pack=False refers to weight files in place: name them with weights=")
    if not pack and cast:
        raise PassError(
            "cast=True converts weights while they are packed: leave out pack=False, or convert the files "
            "with `penstock convert --dtype`"
        )
    if (cast or slices) and weights is None:
        action = "cast=True converts" if cast else "slices= divides"
        raise PassError(f"{action} a checkpoint's tensors: name its files with weights=")


def _check_lowering(
    lowering: str, options: Mapping[str, Any] | None, resident_below: int | str | None
) -> None:
    if lowering not in ("eager", "inductor"):
        raise PassError(f"there is no lowering {lowering!r}: choose 'eager' or 'inductor'")
    if lowering == "eager" and options is not None:
        raise PassError("options= are Inductor's: give them with lowering='inductor'")
    if lowering == "eager" and resident_below is not None:
        raise PassError("resident_below= is for compiled programs: give it with lowering='inductor'")


def _check_names(methods: Sequence[Method]) -> None:
    for method in methods:
        if method.name != "forward" and hasattr(StreamedModule, method.name):
            raise PassError(f"modules have a {method.name!r} of their own: give the method another name")


def _compile(
    annotated: Annotated,
    values: Found | None,
    options: Mapping[str, Any] | None,
    resident_below: int | str | None,
) -> inductor.Compiled:
    programs = annotated.programs if values is None else with_small_values(annotated, values)
    below = "64KiB" if resident_below is None else resident_below
    nbytes = parse_size(below, name="resident_below") if below else 0
    return inductor.lower(annotated.payload, programs, options=options, resident_below=nbytes, by_units=True)


def _open(weights: Paths | None, annotated: Annotated, rename: Rename, *, pack: bool) -> Checkpoint:
    if weights is None:
        return Checkpoint((), {})
    checkpoint = without(open_checkpoint(weights), annotated.computed, rename)
    foreign = [] if pack else [path for path in checkpoint.files if not is_safetensors(path)]
    if foreign:
        raise SourceError(
            f"{foreign[0]} is no safetensors file, and only those are used in place: leave out pack=False, "
            "or write safetensors with `penstock convert`"
        )
    return checkpoint


class _Writer:
    """Decides for each storage where its bytes come from, and writes those that must be written.

    `target` is the artifact's folder, to be named in the log: it is written under another name. With
    `mapped`, storages in place get the phases at which a mapping of their files has them; compiled code
    assumes that weights are aligned, as AOTInductor's own are.
    """

    def __init__(
        self,
        annotated: Annotated,
        values: Found | None,
        target: Path,
        progress: Progress | None,
        *,
        in_place: bool,
        mapped: bool,
    ) -> None:
        self._target = target
        self._payload, self._values = annotated.payload, annotated.values
        self._found = values or Found((), {}, {})
        self._in_place, self._mapped = in_place, mapped
        self._progress = progress
        self._storages = self._found.placed(self._payload.storages)

    def write_weights(self, folder: Path) -> Payload:
        """Write the packed file, if one is needed, and return the payload with files and extents."""
        in_files = [sum(extent.nbytes for extent in storage.extents) for storage in self._storages]
        whole = [s for s, nbytes in enumerate(in_files) if 0 < nbytes == self._storages[s].nbytes]
        in_place = whole if self._in_place else []
        packed = [s for s in _packing_order(self._payload) if s not in set(in_place)]
        packed = [s for s in packed if self._storages[s].nbytes and self._storages[s].kind != "produced"]
        storages = list(self._storages)
        files: list[WeightFile] = []
        if self._in_place:
            files = [stamp_file(p, recorded_path=str(p)) for p in self._found.files]
            self._hash_in_place(storages, in_place, files, folder)
        if packed:
            total = sum(storages[s].nbytes for s in packed)
            entries = [self._entry(s) for s in packed]
            _log.info("writing %s bytes of weights to %s", f"{total:,}", self._target)
            placed = write_packed(
                folder / WEIGHTS, entries, progress=count_bytes(self._progress, "packing weights", total)
            )
            for s, place in zip(packed, placed, strict=True):
                extent = Extent(len(files), place.file_offset, 0, place.nbytes)
                storages[s] = replace(storages[s], extents=(extent,), sha256=place.sha256)
            files.append(stamp_file(folder / WEIGHTS, recorded_path=WEIGHTS))
        return replace(self._payload, files=tuple(files), storages=tuple(storages))

    def _phase(self, storage: Storage) -> int:
        """The phase of a storage in place. What libraries put together of several tensors lies aligned."""
        place = place_in_file(storage) if self._mapped and len(storage.extents) == 1 else None
        return place[1] % ALIGNMENT if place else 0

    def _hash_in_place(
        self, storages: list[Storage], chosen: Sequence[int], files: Sequence[WeightFile], folder: Path
    ) -> None:
        total = sum(storages[s].nbytes for s in chosen)
        report = count_bytes(self._progress, "hashing weights in place", total)
        for s in chosen:
            digest = hash_storage(storages[s], files, folder, progress=report)
            storages[s] = replace(storages[s], sha256=digest, phase=self._phase(storages[s]))

    def _entry(self, s: int) -> PackEntry:
        storage = self._storages[s]
        weight, part = _named_by(self._payload.tensors, s)
        dense = is_dense(part) and part_nbytes(part) == storage.nbytes
        dtype, shape = (part.dtype, part.shape) if dense else ("uint8", (storage.nbytes,))
        chunks = self._file_chunks(s) if s in self._found.spans else self._value_chunks(s, weight)
        return PackEntry(weight.fqn, dtype, shape, storage.nbytes, chunks)

    def _value_chunks(self, s: int, weight: Weight) -> Chunks:
        value: torch.Tensor = self._values[s]
        if not has_values(value):
            kind = "meta" if value.device.type == "meta" else "fake"
            if weight.role == "constant":
                raise PassError(
                    f"constant {weight.fqn!r} of the program has no values (torch left it {kind}): export "
                    "again, outside of any FakeTensorMode, or make it a buffer of the model"
                )
            raise PassError(f"weight {weight.fqn} has no values (it is {kind}): name the files with weights=")
        return lambda: tensor_chunks(storage_bytes(value)[: self._storages[s].nbytes])

    def _file_chunks(self, s: int) -> Chunks:
        def chunks() -> Iterator[Chunk]:
            position = 0
            for start, chunk in self._found.chunks(s):
                yield bytes(start - position)
                yield chunk
                position = start + len(chunk)
            yield bytes(self._storages[s].nbytes - position)

        return chunks


def _packing_order(payload: Payload) -> list[int]:
    """Returns all storages in the order in which they are packed: small, then large, each by first use.

    Behind them come those that are read by units only, which would leave gaps in what is mapped of others.
    Norms and biases apart from the matrices between which they are used fill a few granules, which
    many steps read and every plan therefore keeps: the steps that read nothing else need no probes.
    """
    steps = [step for trace in payload.traces for step in trace.steps]
    order = dict.fromkeys(s for step in steps for s in step.reads)
    order |= dict.fromkeys(range(len(payload.storages)))
    whole = {s for step in steps for s in step.reads if s not in {read.storage for read in step.sparse}}
    by_units = {read.storage for step in steps for read in step.sparse} - whole
    sizes = [storage.nbytes for storage in payload.storages]
    for together in storages_together(payload.weights).values():
        for s in together:  # a small scale lies beside the data that it belongs to
            sizes[s] = sum(payload.storages[other].nbytes for other in together)
    return sorted(order, key=lambda s: (sizes[s] >= BLOCK_ALIGNED_FROM, s in by_units))


def _named_by(weights: Sequence[Weight], storage: int) -> tuple[Weight, Part]:
    """Returns the weight, and its part, that takes most of a storage; the first of several."""
    inside = [(w, p) for w in weights for p in w.parts if p.storage == storage]
    return max(inside, key=lambda pair: prod(pair[1].shape))
