"""Scenarios that write: artifacts, checkpoints, reports, results, and what ExecuTorch lowered."""

import os

import torch
from safetensors.torch import save_file
from torch import nn
from torch.export import export
from typer import BadParameter

import penstock
from penstock.passes.trace import PRESET_CPU
from penstock.runtime.artifact import relink
from penstock.runtime.checkpoint.convert import convert
from penstock.schedule.facts.errors import SourceError
from penstock.schedule.payload.codec import plan_from_json
from tests.faults.scenario import Plain, Scenario, X, exported, of_artifact, of_files, save_checkpoint, stack


class Compiling(Scenario):
    """`over` an artifact of other values, from a checkpoint or from memory, packed or in place."""

    target = "model.penstock"

    def __init__(self, *, over=False, checkpoint=False, pack=True):
        self._over, self._checkpoint, self._pack = over, checkpoint, pack

    def prepare(self, root, beside):
        save_checkpoint(1, root / "checkpoint")
        if self._over:
            penstock.compile(exported(2), root / self.target)

    def act(self, root, started):
        return self._compile(root, force=self._over)

    def again(self, root, started):
        return self._compile(root, force=True)

    def _compile(self, root, *, force):
        weights = root / "checkpoint" if self._checkpoint else None
        penstock.compile(exported(1), root / self.target, weights=weights, pack=self._pack, force=force)
        return ""

    def found(self, root):
        return of_artifact(root / self.target)


class Converting(Scenario):
    """From one form to another: a file, or shards in a folder."""

    def __init__(self, source, target, *, over):
        self._source, self.target, self._over = source, target, over

    def prepare(self, root, beside):
        tensors = {name: one for name, one in stack(1).state_dict().items() if name != "head.weight"}
        root.mkdir(exist_ok=True)
        if self._source == "shards":
            save_checkpoint(1, root / "shards")
        elif self._source == "distributed":
            from torch.distributed.checkpoint import save

            save(tensors, checkpoint_id=root / "distributed", no_dist=True)
        elif self._source.endswith(".pt"):
            torch.save(tensors, root / self._source)
        else:
            save_file(tensors, root / self._source)
        if self._over:
            save_checkpoint(2, root / "other")
            self._convert(root / "other", root, force=False)

    def act(self, root, started):
        return self._convert(root / self._source, root, force=self._over)

    def again(self, root, started):
        return self._convert(root / self._source, root, force=True)

    def _convert(self, source, root, *, force):
        target = root / self.target
        most = None if target.suffix else "40KiB"
        convert(source, target, shard_size=most, dtype="bfloat16", force=force)
        return ""

    def found(self, root):
        return of_files(root / self.target)


class Relinking(Scenario):
    """An artifact that refers to files in place gets the paths of copies of them."""

    target = "model.penstock"

    def prepare(self, root, beside):
        save_checkpoint(1, root / "before")
        penstock.compile(exported(1), root / self.target, weights=root / "before", pack=False)
        (root / "before").rename(root / "after")

    def act(self, root, started):
        relink(root / self.target, [root / "after"])
        return ""

    def found(self, root):
        return of_files(root / self.target / "payload.json")


class Reporting(Scenario):
    """The page of a plan takes the place of another."""

    target = "plan.html"

    def prepare(self, root, beside):
        program = penstock.compile(exported(1), beside / "model.penstock")
        plan = program.plan("60%", arena="paged", hardware=PRESET_CPU)
        (beside / "plan.json").write_text(plan.to_json())
        root.mkdir(exist_ok=True)
        (root / self.target).write_text("old")

    def start(self, root, beside):
        return plan_from_json((beside / "plan.json").read_bytes(), source="plan.json")

    def act(self, root, started):
        started.save_report(root / self.target, force=True)
        return ""

    def found(self, root):
        return of_files(root / self.target)


class Command(Scenario):
    """A command of the command line, given its arguments."""

    def __init__(self, *arguments, target="new"):
        self._arguments, self.target = arguments, target

    def prepare(self, root, beside):
        penstock.compile(export(Plain().eval(), (X,)), root / "model.penstock")
        save_file({"x": X}, root / "in.safetensors")
        self.act(root, None)  # the rates of the machine are known from now on
        (root / "out.safetensors").write_bytes(b"old")

    def act(self, root, started):
        from penstock.cli.main import assemble

        arguments = [one.replace("ROOT", str(root)) for one in self._arguments]
        try:
            assemble()(arguments, prog_name="penstock", standalone_mode=False)
        except BadParameter as error:  # a sentence, and exit status 2
            raise SourceError(error.message) from error
        return ""

    def found(self, root):
        return of_files(root / self.target)


class Exporting(Scenario):
    """A program that ExecuTorch lowered takes the place of another, and is read."""

    target = "out"
    torn = "is not the file that was exported with model.pte"

    def once(self):
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

        from penstock.backends.executorch import PenstockPartitioner

        aligned_blocks = ExecutorchBackendConfig(segment_alignment=4096)
        self._programs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            given = export(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).eval(), (X,))
            edge = to_edge_transform_and_lower(given, partitioner=[PenstockPartitioner(least=4096)])
            self._programs.append(edge.to_executorch(aligned_blocks))

    def prepare(self, root, beside):
        (root / "out").mkdir()
        self._save(root, self._programs[1])

    def act(self, root, started):
        return self._save(root, self._programs[0])

    def _save(self, root, program):
        from penstock.backends.executorch import read, save

        return str(read(save(program, root / "out" / "model.pte", force=True)).payload.storages)

    def found(self, root):
        from penstock.backends.executorch import read

        read(root / "out" / "model.pte")
        return of_files(root / "out" / "model.pte") + of_files(root / "out" / "weights.ptd")


class Carelessly(Scenario):
    """What penstock does not do: the double must show each fault of this."""

    def prepare(self, root, beside):
        (root / "in").write_bytes(bytes(range(100)))
        (root / self.target).write_bytes(b"old")

    def act(self, root, started):
        unfinished = root / f".{self.target}.tmp-0"
        fd = os.open(root / "in", os.O_RDWR)
        data = os.read(fd, 100)
        if len(data) < 60:
            raise SourceError("the file has shrunk")
        os.write(fd, data)  # in the file itself, at its end
        os.ftruncate(fd, 100)
        os.close(fd)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT)
        os.write(fd, data)
        os.close(fd)
        (root / self.target).write_bytes(data)
        fd = os.open(root / self.target, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SourceError("the disk may be full") from error
        os.close(fd)
        unfinished.unlink()
        return ""

    def again(self, root, started):
        (root / self.target).write_bytes((root / "in").read_bytes())
        return ""

    def found(self, root):
        return of_files(root / self.target)
