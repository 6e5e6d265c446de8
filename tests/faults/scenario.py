"""What a scenario is, and the models and hashes that scenarios share."""

import hashlib
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export

import penstock
from penstock.runtime.checkpoint.convert import convert
from tests.runtime.models import Stack, aligned

TOKENS = torch.tensor([[5, 17, 99, 23, 42], [1, 2, 3, 4, 255]])


def bits(*tensors):
    """The hash of the bytes of tensors."""
    digest = hashlib.sha256()
    for one in tensors:
        digest.update(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def stack(seed, width=32):
    """A stack of 70 KiB, or of 9 MiB with a width of 384."""
    torch.manual_seed(seed)
    return aligned(Stack(width, 2, 256)).eval().requires_grad_(False)


@cache
def exported(seed, width=32):
    return export(stack(seed, width), (TOKENS,))


def save_checkpoint(seed, folder):
    """Two shards of a stack, and their index."""
    folder.mkdir(parents=True)
    tensors = {name: one for name, one in stack(seed).state_dict().items() if name != "head.weight"}
    whole = folder.with_suffix(".safetensors")
    save_file(tensors, whole)
    convert(whole, folder, shard_size="40KiB", force=True)
    whole.unlink()


def of_artifact(path):
    """The hashes of what an artifact computes, and of its weights, with which all bytes of it agree."""
    if not path.exists():
        return ""
    program = penstock.open(path)
    program.verify(strict=True)
    assert program.payload.program is not None
    said = [str(one.sha256) for one in program.payload.storages]
    with ZipFile(path / program.payload.program.path) as archive:  # which has the times of its writing
        said += [f"{one.filename} {one.CRC}" for one in archive.infolist()]
    return hashlib.sha256("".join(said).encode()).hexdigest()[:16]


def of_files(path):
    """The hash of a file, or of all in a folder; empty if there is none."""
    if path.is_dir():
        return hashlib.sha256("".join(map(of_files, sorted(path.iterdir()))).encode()).hexdigest()[:16]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class Plain(nn.Module):
    """Linears with weights in float32."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


X = torch.linspace(-1, 1, 64).reshape(2, 32)


class Scenario(ABC):
    """`target` is the path, within the folder, of what is written; `adds` are patterns of what may appear.

    What penstock remembers of the machine meets faults as well if it `remembers` in the folder. What `start`
    returns is made once if the processes that act can inherit it (`inherits`). A kill may leave a target that
    is refused by a message with the words in `torn`, if there are any. Faults that match the pattern `always`
    (`EIO fsync out`) are injected where few others are: they have found something before. What takes long is
    `kept` in a folder for other scenarios.
    """

    kept: Path
    target = "new"
    adds = ()
    remembers = False
    inherits = False
    torn = ""
    always = ""

    def once(self):  # noqa: B027
        """Make what all processes of the scenario share."""

    @abstractmethod
    def prepare(self, root, beside):
        """Fill an empty folder; what is put beside it meets no fault."""

    def start(self, root, beside):
        """Do what comes before and meets no fault, and return what `act` is given."""
        return None

    @abstractmethod
    def act(self, root, started):
        """Do what meets a fault, and return what came of it."""

    def again(self, root, started):
        """Do the same again, in the same process, over what is there."""
        return self.act(root, started)

    def reload(self, root, started):
        """What `again` is given once a file was changed and put back: what ran on it may refuse for ever."""
        return started

    def found(self, root):
        """What the target holds; empty if it is not there."""
        return ""

    def names(self, why, path):
        """Whether a refusal says enough of the file whose call has failed, by its path in the folder."""
        return True
