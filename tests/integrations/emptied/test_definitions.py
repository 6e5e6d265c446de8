"""Functions and values of classes, and functions of their files, that are replaced after the export."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from penstock.integrations import apply
from penstock.schedule.facts.errors import StreamError
from tests.integrations import models

X = torch.linspace(-1, 1, 24).reshape(3, 8)


def deeper(x):
    return x * 2


def helper(x):
    return deeper(x)


def beside(x):
    return x


class Base(nn.Module):
    scale = 1.0

    def inherited(self, x):
        return x

    @property
    def factor(self):
        return 1.0

    @staticmethod
    def plain(x):
        return x


class Part(Base):
    scale = 2.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def own(self, x):
        return next(helper(one) for one in [x])

    def forward(self, x):
        return self.plain(self.inherited(self.own(self.linear(x)))) * self.scale * self.factor


REPLACED = {
    "Base.inherited": (Base, "inherited", lambda self, x: x * 5),
    "Base.factor": (Base, "factor", property(lambda self: 5.0)),
    "Base.plain": (Base, "plain", staticmethod(lambda x: x * 5)),
    "Part.own": (Part, "own", lambda self, x: x * 5),
    "Part.scale": (Part, "scale", 5.0),
    "Linear.forward": (nn.Linear, "forward", lambda self, x: x),
    f"{__name__}.helper": (sys.modules[__name__], "helper", lambda x: x * 5),
    f"{__name__}.deeper": (sys.modules[__name__], "deeper", lambda x: x * 5),
}


def test_what_is_replaced_is_refused_by_name_until_it_is_as_it_was(tmp_path):
    model = nn.Sequential(models.frozen(Part()))
    expected = model(X)
    with apply(model, "1MB", example=X, cache=tmp_path):
        for name, (owner, attribute, other) in REPLACED.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, attribute, other)
                said = rf"any more: ({name}|0\.linear\.forward) changed: take that back, or restore it"
                with pytest.raises(StreamError, match=said):
                    model(X)
            assert torch.equal(model(X), expected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "beside", None)  # is not called
            assert torch.equal(model(X), expected)
