"""Artifacts that somebody has changed, and whose hashes are right again, as a stranger would send them."""

import hashlib
import json
import zipfile

import torch
from torch import nn

import penstock
from penstock.runtime.files.artifact_files import digest_line

X = torch.ones(4, 8)


class Model(nn.Module):
    """A program with a guard on its sizes, a dynamic intermediate value, and a result with keys."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 96), nn.Linear(96, 96), nn.Linear(96, 8)

    def forward(self, x, y):
        if x.shape[0] * y.shape[0] > 100:
            return {"out": x}
        return {"out": self.third(self.second(self.first(x).relu())) + y.sum()}


def make_artifact(path):
    """A small artifact of `Model`."""
    torch.manual_seed(0)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(Model().eval(), (X, torch.ones(5)), dynamic_shapes=({0: auto}, {0: auto}))
    penstock.compile(exported, path)
    return path


def change_code(artifact, change):
    """Change the stored code of the method, and make all hashes right again."""
    program = artifact / "program.zip"
    with zipfile.ZipFile(program) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    stored = json.loads(members["forward.json"])
    change(stored)
    members["forward.json"] = json.dumps(stored).encode()
    write_program(artifact, members)


def write_program(artifact, members):
    """Write the zip with the lowered program anew, and make all hashes right again."""
    program = artifact / "program.zip"
    with zipfile.ZipFile(program, "w", zipfile.ZIP_STORED) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    change_payload(artifact, lambda payload: payload["program"].update(sha256=digest))


def change_payload(artifact, change):
    """Change the payload, and make its hash right again."""
    payload = json.loads((artifact / "payload.json").read_bytes())
    change(payload)
    data = json.dumps(payload).encode()
    (artifact / "payload.json").write_bytes(data)
    (artifact / "payload.json.sha256").write_bytes(digest_line(data))


def use(artifact):
    """Open, load and call an artifact in all the ways in which its stored strings are used."""
    program = penstock.open(artifact)
    program.split_memory("1GiB")
    with program.load("100%") as module:
        return module(X, torch.ones(5))
