"""What is fuzzed: valid files, how they are changed, and the use of them that has to end in a typed error."""

import hashlib
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from penstock.backends.executorch.files import PAYLOAD
from penstock.passes.calls.expressions import parse
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.checkpoint.stored_tensor import Reading
from penstock.runtime.sparse.units import read_routes
from penstock.schedule.payload.codec import Payload, plan_from_json, verify_payload
from penstock.schedule.sparse.routes import Ask, RoutedRead, Routes, routes_to_bytes
from tests.schedule.payload.payload_example import BYTES, PLAN
from tests.trust.hostile import X
from tests.trust.mutations import exchange, mutate_bytes, mutate_json, mutate_tree
from tests.trust.pte_files import read_pte, write_pte
from tests.trust.whole_artifacts import change_facts, change_graph, wholes

Mutate = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """Files to change, and what is done with a changed one; `folder` is for the file, and stays between uses.

    `use` may raise a PenstockError, and nothing else.
    """

    seeds: tuple[bytes, ...]
    mutate: tuple[Mutate, ...]
    use: Callable[[bytes], object]

    def case(self, seed, number):
        """The changed file of a number."""
        chosen = random.Random(f"{seed} {number}")
        data, mutate = chosen.choice(self.seeds), chosen.choice(self.mutate)
        for _ in range(chosen.choice((1, 1, 2))):
            data = mutate(chosen, data)
            if mutate is mutate_bytes:
                break
        return data


def make_target(name, folder):
    """One target, whose files are made in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return _TARGETS[name](folder)


def _payload(folder):
    return Target(
        (BYTES,),
        (mutate_json, mutate_json, mutate_bytes),
        lambda data: verify_payload(Payload.from_bytes(data)),
    )


def _artifact(_):
    return Target(wholes().documents, (change_facts,), wholes().use)


def _graph(_):
    return Target(wholes().documents, (change_graph,), wholes().use)


def _expressions(folder):
    seeds = (
        b"32*s17 + 32*s17*((-1) + s77)",
        b"leaves[1].size()[0]*leaves[0].size()[0] <= 100 and not (leaves[0].stride()[0] == 1)",
        b"max(1, s0 // 2) if s0 % 2 == 0 else math.floor(torch.sym_float(s0) / 3) ** 2 - round(s0, 1)",
    )

    def use(data):
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):
            parse(data.decode("latin-1"))({"s0": 3, "s17": 5, "s77": 7}, (X, X, 3))

    return Target(seeds, (mutate_bytes, _mutate_text), use)


def _mutate_text(chosen, data):
    words = (
        b"(",
        b")",
        b"not ",
        b" and ",
        b"**",
        b" if ",
        b" else ",
        b"9" * 40,
        b"leaves[",
        b"__import__",
        b"-",
    )
    at = chosen.randrange(len(data) + 1)
    return data[:at] + chosen.choice(words) * chosen.choice((1, 1, 2, 99)) + data[at + chosen.randrange(3) :]


def _read_all(paths):
    """Opens a checkpoint, and reads the first and last bytes of each tensor."""
    opened = open_checkpoint(paths)
    for tensor in opened.tensors.values():
        for chunk in Reading(tensor, tensor.whole).chunks(opened.files):
            assert len(chunk)


def _file(path, open_it=_read_all):
    def use(data):
        path.write_bytes(data)
        return open_it(path)

    return use


def _state():
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b.c": torch.ones(2, dtype=torch.bfloat16),
        "d": torch.ones(()),
    }


def _safetensors(folder):
    path = folder / "model.safetensors"
    save_file(_state(), path, metadata={"format": "pt"})
    return Target((path.read_bytes(),), (mutate_bytes, _mutate_header), _file(path))


def _mutate_header(chosen, data):
    """Changes the JSON of a safetensors header, whose length stays right."""
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json(chosen, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _torch_zip(folder):
    path = folder / "model.pt"
    torch.save({"state_dict": _state(), "step": 3}, path)
    return Target((path.read_bytes(),), (mutate_bytes, _mutate_pickle), _file(path))


def _mutate_pickle(chosen, data):
    """Changes the pickle in a zip, whose checksums are right again."""
    import io

    read, written = io.BytesIO(data), io.BytesIO()
    with zipfile.ZipFile(read) as before, zipfile.ZipFile(written, "w") as after:
        for info in before.infolist():
            member = before.read(info)
            changed = mutate_bytes(chosen, member) if info.filename.endswith(".pkl") else member
            after.writestr(info.filename, changed)
    return written.getvalue()


def _distributed(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(), storage_writer=dcp.FileSystemWriter(folder / "saved"))
    metadata = folder / "saved" / ".metadata"
    return Target(
        (metadata.read_bytes(),), (mutate_bytes,), _file(metadata, lambda _: _read_all(folder / "saved"))
    )


def _chunks(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(), storage_writer=dcp.FileSystemWriter(folder / "saved"))
    (chunk,) = (folder / "saved").glob("*.distcp")
    return Target((chunk.read_bytes(),), (mutate_bytes,), _file(chunk, lambda _: _read_all(folder / "saved")))


def _index(folder):
    shards = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b.c", "d"]}
    for name, tensors in shards.items():
        save_file({one: _state()[one] for one in tensors}, folder / name)
    index = {
        "metadata": {"total_size": 56},
        "weight_map": {one: name for name, tensors in shards.items() for one in tensors},
    }
    path = folder / "model.safetensors.index.json"
    return Target((json.dumps(index).encode(),), (mutate_json, mutate_bytes), _file(path))


def _plan(folder):
    return Target((PLAN.to_json().encode(),), (mutate_json, mutate_bytes), plan_from_json)


def _routes(folder):
    read = RoutedRead("forward", 0, 3, "embedding", "embed.weight", 100, 64)
    calls = ((Ask(0, (1, 5, 99)),), (Ask(0, ()),))
    seed = routes_to_bytes(Routes((read,), calls))

    def mutate_line(chosen, data):
        rows = data.splitlines()
        k = chosen.randrange(len(rows))
        rows[k] = mutate_json(chosen, rows[k])
        return b"\n".join(rows) + b"\n"

    return Target((seed,), (mutate_line, mutate_bytes), _file(folder / "routes.jsonl", read_routes))


def _configuration(folder):
    """The configuration of a model of transformers, which is opened and built without memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.integrations.folders import open_model

    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    path = folder / "model" / "config.json"

    def use(_):
        open_model(folder / "model")

    return Target((path.read_bytes(),), (mutate_json, mutate_bytes), _file(path, use))


def _pipeline(folder):
    """The list of a pipeline's parts, none of which is loaded."""
    from penstock.integrations.folders import open_pipeline

    index = {
        "_class_name": "DDPMPipeline",
        "_diffusers_version": "0.34.0",
        "scheduler": ["diffusers", "DDPMScheduler"],
        "unet": [None, None],
    }
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "DDPMScheduler"}')
    path = folder / "model_index.json"
    return Target(
        (json.dumps(index).encode(),),
        (mutate_json, mutate_bytes),
        _file(path, lambda _: open_pipeline(folder)),
    )


def _export(folder):
    """A `.pte` with a region for each of two linears, beside its `.ptd`."""
    from tests.backends.executorch.conftest import lower_to
    from tests.backends.executorch.et_models import Mlp

    torch.manual_seed(0)
    exported = torch.export.export(Mlp().eval(), (torch.randn(2, 128),))
    return lower_to(folder, exported, budget="70%").path


def _use_pte(path):
    """Reads a `.pte` and all that `penstock inspect` shows of it."""
    from penstock.backends.executorch import read
    from penstock.cli.inspect import _facts, _totals, artifact_tables, delegate_tables
    from penstock.schedule.report.graphs import to_json

    exported = read(path)
    json.dumps(_facts(exported)), _totals(exported), artifact_tables(exported), delegate_tables(exported)
    to_json(exported.payload.read_graph())
    for method in exported.payload.methods:
        to_json(exported.plan("90%").event_graph(method.name))


def _pte(folder):
    path = _export(folder)
    parts = read_pte(path.read_bytes())
    seed = write_pte(parts.named, parts.delegates)
    return Target((seed,), (_mutate_parts, _mutate_parts, mutate_bytes), _file(path, _use_pte))


def _mutate_parts(chosen, data):
    """Changes the payload or a region of a `.pte`, or which parts there are, and makes all hashes right."""
    parts = read_pte(data)
    named, delegates = dict(parts.named), list(parts.delegates)
    (key,) = (key for key in named if key.startswith(PAYLOAD))
    k, what = chosen.randrange(len(delegates)), chosen.randrange(4)
    text = delegates[k].processed.partition(b"\n")[2]
    if what == 0:
        tree = json.loads(named.pop(key))
        chosen.choice((exchange, mutate_tree))(chosen, tree)
        changed = json.dumps(tree).encode()
        new = PAYLOAD + hashlib.sha256(changed).hexdigest()
        named[new] = changed
        delegates = [
            _region(one, one.processed.replace(key.encode(), new.encode())[65:]) for one in delegates
        ]
    elif what < 3:
        tree = json.loads(text)
        chosen.choice((exchange, mutate_tree))(chosen, tree)
        delegates[k] = _region(delegates[k], json.dumps(tree).encode())
    elif len(named) > 1 and chosen.random() < 0.5:
        del named[chosen.choice([one for one in named if one != key])]
    else:
        delegates.insert(chosen.randrange(len(delegates)), delegates.pop(k))
    return write_pte(named, delegates)


def _region(one, text):
    return replace(one, processed=hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def _ptd(folder):
    """The list of a `.ptd`, in front of its weights."""
    path = _export(folder)
    data = path.with_name("weights.ptd")
    (_, size) = struct.unpack_from("<QQ", data.read_bytes(), 16)
    head = data.read_bytes()[: 48 + size]
    weights = data.read_bytes()[len(head) :]

    def use(changed):
        data.write_bytes(changed + weights)
        _use_pte(path)

    return Target((head,), (mutate_bytes,), use)


_TARGETS = {
    "payload": _payload,
    "artifact": _artifact,
    "graph": _graph,
    "expressions": _expressions,
    "safetensors": _safetensors,
    "torch": _torch_zip,
    "distributed": _distributed,
    "chunks": _chunks,
    "index": _index,
    "plan": _plan,
    "routes": _routes,
    "configuration": _configuration,
    "pipeline": _pipeline,
    "pte": _pte,
    "ptd": _ptd,
}
NAMES = tuple(_TARGETS)
