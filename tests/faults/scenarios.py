"""What meets faults: scenarios by name, each of which prepares a folder and acts in it, again and again."""

import penstock
from tests.faults.caching import Applying, LoadingModel, Pruning
from tests.faults.programs import Delegating, WithoutPython
from tests.faults.running import Compiled, Loading, Planning, Running, Verifying
from tests.faults.scenario import exported, of_artifact
from tests.faults.writing import Carelessly, Command, Compiling, Converting, Exporting, Relinking, Reporting

_LARGE = {"width": 384, "budget": "80%"}
"""For arenas whose granules are of 2 MiB."""

_SCENARIOS = {
    "compile": Compiling,
    "compile over another": lambda: Compiling(over=True),
    "compile a checkpoint": lambda: Compiling(checkpoint=True),
    "compile in place": lambda: Compiling(checkpoint=True, pack=False),
    "convert a file": lambda: Converting("in.safetensors", "out.safetensors", over=True),
    "convert to shards": lambda: Converting("shards", "out", over=True),
    "convert torch's": lambda: Converting("in.pt", "out.safetensors", over=False),
    "convert a distributed one": lambda: Converting("distributed", "out.safetensors", over=False),
    "relink": Relinking,
    "verify": Verifying,
    "plan": Planning,
    "report": Reporting,
    "penstock run": lambda: Command(
        "run", "ROOT/model.penstock", "--budget", "100%", "--arena", "paged", "--engine", "python",
        "--input", "ROOT/in.safetensors", "--output", "ROOT/out.safetensors", "--force",
        target="out.safetensors",
    ),
    "apply": lambda: Applying(warm=False),
    "apply again": lambda: Applying(warm=True),
    "load a model": LoadingModel,
    "penstock cache clear": Pruning,
    "save for ExecuTorch": Exporting,
    "penstock-run": WithoutPython,
    "penstock-run, a new output": lambda: WithoutPython(over=False),
    "penstock-run, mapped": lambda: WithoutPython(arena="mapped"),
    "delegate, mapped": lambda: Delegating("mmap"),
    "delegate, read": lambda: Delegating("file"),
    "delegate, compiled code": lambda: Delegating("mmap", "aotinductor"),
    "compiled code": lambda: Compiled("paged", "auto"),
    **{
        f"{kind.__name__.lower()} {arena}, {engine}": lambda kind=kind, arena=arena, engine=engine: kind(
            arena, engine, **(_LARGE if arena == "mapped" else {})
        )
        for kind in (Loading, Running)
        for arena in ("paged", "contiguous", "mapped")
        for engine in ("python", "native")
    },
}  # fmt: skip


def names():
    """The names of all scenarios but the careless one."""
    return tuple(_SCENARIOS)


def scenario(name):
    return Carelessly() if name == "carelessly" else _SCENARIOS[name]()


def warm(place):
    """Do once what the first call in a process takes long for, so that forked processes need not."""
    path = place / "model.penstock"
    place.mkdir(parents=True, exist_ok=True)
    for seed in (1, 2):
        penstock.compile(exported(seed), path, force=True)
    of_artifact(path)
    loading = Loading("paged", "auto")
    loading.kept = place.parent / "kept"
    loading.prepare(place / "loading", place)
    loading.act(place / "loading", loading.start(place, place))
