"""Files that claim any size, have no end, or nest without end: a sentence says so, at once, in no memory.

One child process uses all kinds of files, with an address space that is a little larger than what it has.
"""

import io
import json
import os
import pickle
import re
import resource
import signal
import socket
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.backends.executorch import read as read_pte
from penstock.integrations.folders import open_folder
from penstock.runtime.cache import list_entries
from penstock.runtime.checkpoint.opening import open_checkpoint
from penstock.runtime.files.artifact_files import artifact_digest, digest_line
from penstock.runtime.machine.figures import measurements
from penstock.runtime.sparse.units import read_routes
from tests.forked import run_forked
from tests.trust.hostile import make_artifact, write_program

HOLE = 64 << 30
ROOM = 300 << 20
"""Bytes that the child may add to its address space."""

DEEP = b'{"files":' + b"[" * 200_000


def name_of(number):
    return f"{number:032x}"


def read_entries(folder):
    return "".join(one.made_for for one in list_entries(folder)) or None


def read_onnx(folder):
    from penstock.backends.onnx import StreamedModel

    return StreamedModel(folder, "100%")


def open_model(folder):
    return open_folder(folder, None, None, train=False)


FILES = {
    "payload": ("model.penstock/payload.json", penstock.open, False),
    "digest": ("model.penstock/payload.json.sha256", penstock.open, False),
    "lowered program": ("model.penstock/program.zip", penstock.open, False),
    "digest of a plan's artifact": ("model.penstock/payload.json.sha256", artifact_digest, True),
    "index": ("shards/model.safetensors.index.json", open_checkpoint, False),
    "torch": ("torch/model.pt", lambda folder: open_checkpoint(folder / "model.pt"), False),
    "distributed": ("distributed/.metadata", open_checkpoint, False),
    "configuration": ("model/config.json", open_model, False),
    "pipeline": ("pipeline/model_index.json", open_model, False),
    "scheduler": ("pipeline/scheduler/scheduler_config.json", lambda f: open_model(f.parent), False),
    "routes": ("routes/calls.routes", lambda folder: read_routes(folder / "calls.routes"), False),
    ".pte": ("pte/model.pte", lambda folder: read_pte(folder / "model.pte"), False),
    "ONNX": ("onnx/model.onnx", read_onnx, False),
    "ONNX payload": ("onnx/payload.json", read_onnx, False),
    "measurements": ("cache/penstock/hardware.json", lambda _: measurements() or None, True),
    "record": (
        f"cache/penstock/weights/{name_of(1)}/entry.json",
        lambda f: read_entries(f.parent.parent),
        True,
    ),
}
"""The file of each kind, what uses its folder, and whether a bad one counts as missing, not as an error."""


def make_files(folder):
    make_artifact(folder / "model.penstock")
    for path, *_ in FILES.values():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    tensor = {"weight": torch.ones(4)}
    save_file(tensor, folder / "shards" / "model.safetensors")
    save_file(tensor, folder / "model" / "model.safetensors")
    index = {"_class_name": "DDPMPipeline", "scheduler": ["diffusers", "DDPMScheduler"], "unet": [None, None]}
    (folder / "pipeline" / "model_index.json").write_text(json.dumps(index))
    (folder / "onnx" / "payload.json").write_text("{}")


def make_hole(path):
    path.touch()
    os.truncate(path, HOLE)
    return path


def make_socket(path):
    before = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(before)


FORMS = {
    "hole": make_hole,
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "socket": make_socket,
    "loop of links": lambda path: path.symlink_to(path),
    "link to a hole": lambda path: path.symlink_to(make_hole(path.with_name("hole"))),
    "file without a size": lambda path: path.symlink_to("/proc/self/maps"),
    "deep JSON": lambda path: path.write_bytes(DEEP),
}


def say(use):
    """What a use comes to: the error's tree and sentence, `returned`, or what went wrong."""

    def late(*_):
        raise TimeoutError("it hangs")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        found = use()
    except penstock.PenstockError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"RAISED {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return "nothing" if found is None else f"RETURNED {found!r:.80}"


def use_all(folder):
    """Prints what every kind of file comes to in every form, and how much memory that took."""
    for module in ("diffusers", "onnx", "onnxruntime", "transformers", "peft"):
        try:
            __import__(module)
        except ImportError:
            continue
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.setsid()  # so that /dev/tty has nothing behind it
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + ROOM, own + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {}
    for kind, (name, use, _) in FILES.items():
        path = folder / name
        for form, make in FORMS.items():
            os.rename(path, path.with_name("aside"))
            make(path)
            found[f"{kind}/{form}"] = say(lambda use=use, path=path: use(path.parent))  # type: ignore[misc]
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            os.rename(path.with_name("aside"), path)
    for name, bomb in BOMBS.items():
        found[name] = say(bomb(folder / name))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print("RESULT" + json.dumps(found | {"grown": str(grown >> 10)}))


# Files that are larger inside than they look, or whose first bytes are right.


def deflate(path, bomb, members):
    """Writes a zip with a member that is larger than there is memory for."""
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name != bomb:
                archive.writestr(name, data)
        member = zipfile.ZipInfo(bomb)
        member.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(member, "w") as file:
            for _ in range(0, 4 * ROOM // 3, len(ZEROS)):
                file.write(ZEROS)
    return path


ZEROS = bytes(1 << 20)


def compressed_record(name):
    """A file of torch.save with a record that torch reads first, and that is small until it is inflated."""

    def make(folder):
        torch.save({"a": torch.ones(3)}, stored := io.BytesIO())
        with zipfile.ZipFile(stored) as archive:
            members = {one: archive.read(one) for one in archive.namelist()}
        path = deflate(folder / "model.pt", f"archive/{name}", members)
        return lambda: open_checkpoint(path)

    return make


def directory_of_a_zip(folder):
    """A zip whose directory has a gigabyte, of nothing."""
    folder.mkdir()
    path = folder / "model.pt"
    with path.open("wb") as file:
        file.write(b"PK\3\4")
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, (1 << 30) - 4, 4, 0))
    return lambda: open_checkpoint(path)


def long_bytes(folder):
    """A checkpoint's pickle that begins with a value of 8 GiB, of which the disk has nothing."""
    folder.mkdir()
    with (folder / ".metadata").open("wb") as file:
        file.write(pickle.PROTO + b"\4" + pickle.BINBYTES8 + struct.pack("<Q", 8 << 30))
        file.truncate(16 << 30)
    return lambda: open_checkpoint(folder)


def program_of_a_pte(folder):
    folder.mkdir()
    with (folder / "model.pte").open("wb") as file:
        file.write(struct.pack("<I4s4sIQQ", 32, b"ET12", b"eh00", 24, 8 << 30, 8 << 30))
        file.truncate(16 << 30)
    return lambda: read_pte(folder / "model.pte")


def buffer_of_a_model(folder):
    """A model whose files have 8 GiB of nothing for a buffer of four values."""
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic")
    ResNetModel(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = next(one for one in header if one.endswith("running_mean"))
    header[name + ".old"] = header[name]
    header[name] = {"dtype": "F32", "shape": [1 << 31], "data_offsets": [len(body), len(body) + (8 << 30)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)
        file.truncate(8 + len(text) + len(body) + (8 << 30))
    return lambda: open_model(folder).make()  # type: ignore[attr-defined]


def deep_method(folder):
    folder.mkdir()
    artifact = make_artifact(folder / "model.penstock")
    write_program(artifact, {"forward.json": b"[" * 200_000})
    return lambda: penstock.open(artifact).load("100%")


BOMBS = {
    "compressed version": compressed_record("version"),
    "compressed byte order": compressed_record("byteorder"),
    "compressed pickle": compressed_record("DATA.PKL"),
    "directory of a zip": directory_of_a_zip,
    "long bytes": long_bytes,
    "program of a pte": program_of_a_pte,
    "buffer of a model": buffer_of_a_model,
    "deep method": deep_method,
}


CHILD = """
import pathlib, runpy, sys
runpy.run_path(sys.argv[1])["use_all"](pathlib.Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    done = run_forked(CHILD, __file__, folder, warnings="ignore")
    (line,) = [one for one in done.out.splitlines() if one.startswith("RESULT")] or [done.err]
    found = json.loads(line.removeprefix("RESULT"))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_file_takes_time_or_memory(said, form):
    wrong = {}
    for kind, (_, _, missing) in FILES.items():
        came = said[f"{kind}/{form}"]
        if came != "nothing" if missing else not came.startswith("refused: "):
            wrong[kind] = came
    assert not wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bomb", "sentence"),
    {
        "compressed version": "refused: .* has archive/version compressed",
        "compressed byte order": "refused: .* has archive/byteorder compressed",
        "compressed pickle": "refused: .* has archive/DATA.PKL compressed",
        "directory of a zip": "refused: .* more than 32 MiB, which a directory of a zip never has",
        "long bytes": "refused: .* more than 256 MiB, which a pickle of a checkpoint never has",
        "program of a pte": "refused: .* a .pte without weights has 536,870,912 bytes at most",
        "buffer of a model": r"refused: .* has .*running_mean as \[2147483648\] in its files and \[4\] by",
        "deep method": "refused: .* cannot be loaded",
    }.items(),
)
def test_what_is_larger_inside_is_refused(said, bomb, sentence):
    assert re.match(sentence, said[bomb], re.DOTALL), said[bomb]


@pytest.mark.timeout(300)
def test_all_of_them_take_little_memory(said):
    assert int(said["grown"]) < 150  # MiB


def test_the_sentence_has_the_file_both_sizes_and_the_kind(tmp_path):
    path = tmp_path / "calls.routes"
    path.touch()
    os.truncate(path, HOLE)
    with pytest.raises(
        penstock.PayloadError, match=rf"{path} has {HOLE:,} bytes, more than 64 MiB, which a file"
    ):
        read_routes(path)


COMMAND = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
from penstock.cli.main import main
main()
"""


@pytest.mark.timeout(60)
def test_commands_end_in_a_sentence(tmp_path):
    """`penstock inspect` of an artifact whose payload is a hole, and `penstock replay` of a pipe."""
    (tmp_path / "model.penstock").mkdir()
    make_hole(tmp_path / "model.penstock" / "payload.json")
    os.mkfifo(tmp_path / "calls.routes")
    for arguments, sentence in (
        (["inspect", "model.penstock"], "payload.json has 68,719,476,736 bytes, more than 256 MiB"),
        (["replay", "calls.routes", "--artifact", "model.penstock"], "payload.json has 68,719,476,736 bytes"),
    ):
        done = run_forked(COMMAND, *arguments, folder=tmp_path, warnings="ignore")
        assert done.status != 0
        assert sentence in done.err + done.out


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    """What the system says of its size is asked before, and is wrong by then."""
    path = tmp_path / "calls.routes"
    path.touch()
    state = os.fstat

    def grow(fd):
        found = state(fd)
        os.truncate(path, HOLE)
        return found

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(penstock.PayloadError, match="more than 64 MiB"):
        read_routes(path)


RUN = Path("build/run/penstock-run")


@pytest.mark.skipif(not RUN.exists(), reason="penstock-run is not built (scripts/build-run)")
@pytest.mark.parametrize("name", ["payload.json", "payload.json.sha256", "program.zip"])
def test_penstock_run_refuses_what_is_too_large(tmp_path, name):
    data = json.dumps(
        {"format": "penstock", "version": 12, "lowering": "inductor", "program": {"path": "program.zip"}}
    ).encode()
    (tmp_path / "payload.json").write_bytes(data)
    (tmp_path / "payload.json.sha256").write_bytes(digest_line(data))
    (tmp_path / name).unlink(missing_ok=True)
    make_hole(tmp_path / name)
    limited = ["/bin/sh", "-c", 'ulimit -v 8000000; exec "$@"', "sh"]
    command = [*limited, RUN.absolute(), tmp_path, "--budget", "1MB", "--trust"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert f"{name} has {HOLE} bytes, more than the " in done.stderr
