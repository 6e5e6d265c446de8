"""The digest of an artifact is that of all of it, and a strict check finds each byte that was changed."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import penstock
from tests.cli.command_line import Command, penstock_fixture  # noqa: F401
from tests.trust.hostile import X, change_code, change_payload, make_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return make_artifact(tmp_path_factory.mktemp("sealed") / "model.penstock")


@pytest.fixture
def copy(artifact, tmp_path):
    return Path(shutil.copytree(artifact, tmp_path / "model.penstock"))


def test_a_copy_has_the_digest_and_runs_by_it(artifact, copy):
    digest = penstock.open(artifact).digest
    assert digest == hashlib.sha256((copy / "payload.json").read_bytes()).hexdigest()
    program = penstock.open(copy)
    assert program.verify(strict=True, digest=digest) == program.weight_bytes
    assert program.verify(digest=f"sha256:{digest}") == program.weight_bytes
    with program.load("100%", digest=digest.upper()) as module, program.load("100%") as other:
        assert torch.equal(module(X, torch.ones(5))["out"], other(X, torch.ones(5))["out"])


def test_any_byte_that_is_changed_is_found(copy):
    """In whichever file it is, and with the hashes made right again where a stranger can."""
    files = sorted(path for path in copy.iterdir())
    assert len(files) == 4
    chosen, digest = random.Random(3), penstock.open(copy).digest
    for path in files:
        data = path.read_bytes()
        for place in (0, len(data) - 1, *(chosen.randrange(len(data)) for _ in range(30))):
            path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
            with pytest.raises(penstock.PenstockError):
                penstock.open(copy).load("100%", digest=digest)
        path.write_bytes(data)
    penstock.open(copy).load("100%", digest=digest).close()


@pytest.mark.parametrize(
    "change",
    [
        lambda copy: change_code(
            copy, lambda stored: stored["graph"]["nodes"][9].__setitem__(2, "aten.abs.default")
        ),
        lambda copy: change_payload(
            copy, lambda payload: payload["methods"][0]["symbols"][0].update(example=7)
        ),
    ],
    ids=["code", "payload"],
)
def test_another_artifact_whose_hashes_are_right_has_another_digest(copy, change):
    digest = penstock.open(copy).digest
    change(copy)
    program = penstock.open(copy)
    program.verify(strict=True)  # it is whole, and another one
    assert program.digest != digest
    with pytest.raises(
        penstock.SourceError, match=rf"is not the artifact of the digest {digest}: its own is"
    ):
        program.load("100%", digest=digest)


@pytest.mark.parametrize("digest", ["", "0" * 64, "x", "9" * 500, "sha256:", "sha256:" + "0" * 64])
def test_what_is_no_digest_of_it(copy, digest):
    with pytest.raises(penstock.SourceError, match="is not the artifact of the digest"):
        penstock.open(copy).verify(digest=digest)


def between(copy):
    """A byte of the weights' file that no storage has."""
    payload = json.loads((copy / "payload.json").read_bytes())
    data = (copy / "weights.safetensors").read_bytes()
    used = {
        byte
        for storage in payload["storages"]
        for extent in storage["extents"]
        for byte in range(extent["file_offset"], extent["file_offset"] + extent["nbytes"])
    }
    header = 8 + int.from_bytes(data[:8], "little")
    return next(place for place in range(header, len(data)) if place not in used)


def test_bytes_between_weights_are_zeros(copy):
    place, path = between(copy), copy / "weights.safetensors"
    data = path.read_bytes()
    assert data[place] == 0
    path.write_bytes(data[:place] + b"x" + data[place + 1 :])
    # The file is small enough for a sampled block to have it: make that right again, as a stranger would.
    from penstock.runtime.files.artifact_files import stamp_file

    stamp = stamp_file(path, recorded_path="weights.safetensors").sampled_sha256
    change_payload(copy, lambda payload: payload["files"][0].update(sampled_sha256=stamp))
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(penstock.SourceError, match=r"holds bytes from .* that belong to no weight"):
        program.verify(strict=True)


@pytest.mark.parametrize("name", ["more.py", ".hidden", "folder", "link", "folder/inner"])
def test_a_file_that_is_no_part_of_it(copy, name):
    path = copy / name
    if name == "link":
        path.symlink_to("payload.json")
    elif name == "folder":
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(
        penstock.SourceError, match=rf"holds {name.partition('/')[0]}.*, which is no part of it"
    ):
        program.verify(strict=True)


def test_a_weight_file_that_is_a_link(copy, tmp_path):
    shutil.move(copy / "weights.safetensors", tmp_path / "w")
    (copy / "weights.safetensors").symlink_to(tmp_path / "w")
    with pytest.raises(penstock.SourceError, match=r"holds weights\.safetensors, which is no part of it"):
        penstock.open(copy).verify(strict=True)


def test_strict_reads_the_code(copy):
    change_code(copy, lambda stored: stored["weights"][0].__setitem__(2, "float64"))
    program = penstock.open(copy)
    program.verify()
    with pytest.raises(penstock.PayloadError, match=r"weight 'first\.weight' of method 'forward' is"):
        program.verify(strict=True)


def test_the_commands(penstock, copy, tmp_path):
    digest = hashlib.sha256((copy / "payload.json").read_bytes()).hexdigest()
    found = json.loads(penstock("verify", copy, "--strict", "--json").out)
    assert (found["digest"], found["verified_bytes"]) == (
        digest,
        4 * (8 * 96 + 96 + 96 * 96 + 96 + 96 * 8 + 8),
    )
    assert f"digest {digest}" in penstock("verify", copy).out
    assert penstock("verify", copy, "--digest", digest).status == 0
    assert penstock("run", copy, "--budget", "100%", "--digest", digest).status == 0
    for command in (("verify", copy), ("run", copy, "--budget", "100%")):
        done = penstock(*command, "--digest", "0" * 64)
        assert done.status == 2
        assert f"is not the artifact of the digest {'0' * 64}: its own is {digest}" in done.err
