"""Scenarios of `apply` and of its cache."""

import math

import torch

from penstock.runtime.cache import list_entries, prune
from tests.faults.scenario import Plain, Scenario, X, bits


class Applying(Scenario):
    """`apply` with a cache, which is `warm` if another process has filled it."""

    adds = ("cache", "cache/*")

    def __init__(self, *, warm):
        self._warm = warm

    def prepare(self, root, beside):
        if self._warm:
            self.act(root, self.start(root, beside))

    def start(self, root, beside):
        self._applied = None
        return Plain().eval().requires_grad_(False)

    def act(self, root, started):
        from penstock.integrations import apply

        self._applied = apply(started, "1MB", cache=root / "cache")
        value = bits(started(X))
        self._applied.restore()
        self._applied = None
        return value

    def reload(self, root, started):
        """A model that cannot be restored, because what it was given back for has changed, is made again."""
        return self.start(root, root)

    def again(self, root, started):
        if self._applied is not None:
            self._applied.restore()
        return self.act(root, started)


class LoadingModel(Scenario):
    """A model of transformers is loaded from its folder; another process has filled the cache."""

    adds = ("cache/*",)

    def once(self):
        from tests.integrations import models

        self._model = models.llama(num_hidden_layers=1)

    def prepare(self, root, beside):
        self._model.save_pretrained(root / "model")
        self.act(root, None)

    def act(self, root, started):
        from penstock.integrations import load

        with load(root / "model", "500KB", cache=root / "cache") as model:
            return bits(model(torch.tensor([[5, 17, 99]])).logits)


class Pruning(Scenario):
    """The cache is emptied; what a killed run left goes as well."""

    adds = ("*",)

    def prepare(self, root, beside):
        from penstock.integrations import apply

        with apply(Plain().eval().requires_grad_(False), "1MB", cache=root):
            pass
        left = root / "weights" / f".{'0' * 32}.tmp-01234567"
        left.mkdir()
        (left / "weights.safetensors").write_bytes(b"left")

        (beside / "entries").write_text(str(len(list_entries(root))))

    def start(self, root, beside):
        return (beside / "entries").read_text()

    def act(self, root, started):
        done = prune(root, before=math.inf)
        return str(len(done.removed) + len(done.in_use))

    def again(self, root, started):
        prune(root, before=math.inf)
        assert not [path for path in root.rglob("*") if path.is_file()]
        return str(started)
