"""Every model of `pass_models`, exported, lowered, stored, loaded and run with poisoned weights."""

import copy

import pytest
import torch
from pass_models import CASES
from pass_runs import export, prepare, same_bits, streaming

from penstock.passes.lowering import eager


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "raw") for name in CASES]
    + [(name, "strict") for name in ("Branches", "Cache", "Nested", "TiedEmbedding", "WithoutGrad")]
    + [(name, "decomposed") for name in ("Cache", "OneStorage", "Returned", "Scan", "TrainingStatistics")]
    + [(name, "decomposed") for name in ("Views", "WrittenInput")],
)
def test_streamed_output_has_the_bits_of_the_model(name, way):
    case = CASES[name]
    model, exported = export(case, strict=way == "strict", decomposed=way == "decomposed")
    lowered, streamer = prepare(exported)
    method = lowered.payload.methods[0]
    steps = lowered.payload.traces[0].steps
    program = eager.bind(lowered, streamer.tensors(), method, range(len(steps)))
    model = copy.deepcopy(model)

    for _ in range(2):
        args, kwargs = case.args(), case.kwargs()
        with torch.no_grad(), streaming(streamer):
            expected = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            streamer.log.clear()
            given = copy.deepcopy((args, kwargs))
            got = program(*given[0], **given[1])
        assert same_bits(got, expected)
        assert streamer.log == [(what, 0, k) for k in range(len(steps)) for what in ("acquire", "release")]
    kinds = {w.fqn: lowered.payload.storages[w.parts[0].storage].kind for w in lowered.payload.weights}
    assert {fqn: kind for fqn, kind in kinds.items() if kind != "streamable"} == case.kinds
    state = model.state_dict(keep_vars=True) | dict(model.named_buffers())
    for fqn in case.kinds:
        assert same_bits(streamer.tensors()[fqn], state[fqn]), fqn
