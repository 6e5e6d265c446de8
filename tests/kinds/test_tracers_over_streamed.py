"""A streamed module inside of somebody else's tracer: Dynamo leaves it alone, and the others are refused."""

import contextlib
import copy
import tempfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.export import export
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import penstock
from penstock import LoadOptions
from penstock.integrations import apply
from penstock.schedule.facts.errors import StreamError
from tests.engines import ENGINES
from tests.hunt import nightly_but

pytestmark = pytest.mark.usefixtures("quiet")

X, LONGER = torch.linspace(-1, 1, 256).view(4, 64), torch.linspace(-1, 1, 448).view(7, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Parent(nn.Module):
    def __init__(self, child):
        super().__init__()
        torch.manual_seed(1)
        self.head, self.child = nn.Linear(64, 64).requires_grad_(False), child

    def forward(self, x):
        return self.head(self.child(x * 1.0)) + 0


class Written(nn.Module):
    """Two blocks, of which one weight is trained, and statistics that a call writes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.BatchNorm1d(64)
        self.requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(True)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(3)]).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def program(model, tmp_path_factory):
    return penstock.compile(export(model, (X,)), tmp_path_factory.mktemp("kinds") / "blocks.penstock")


LOADED = [ENGINES[-1], *ENGINES[:-1], "sim"]


@pytest.fixture(params=nightly_but(LOADED[:1], LOADED))
def streamed(request, program):
    device, engine = ("sim", "auto") if request.param == "sim" else ("cpu", request.param)
    options = LoadOptions(arena="contiguous", engine=engine)
    with program.load("40%", device=device, options=options) as module:
        yield module


def parent_in_place(module, **options):
    parent = Parent(module)
    parent.compile(**options)
    return parent


COMPILED = {
    "itself": torch.compile,
    "a parent": lambda module, **options: torch.compile(Parent(module), **options),
    "a parent, in place": parent_in_place,
    "a function": lambda module, **options: torch.compile(lambda x: module(x) * 1, **options),
    "a list": lambda module, **options: torch.compile(
        lambda x: [m(x) for m in (module, module)][1], **options
    ),
    "a sequence": lambda module, **options: torch.compile(nn.Sequential(module, nn.ReLU()), **options),
    "open sizes": lambda module, **options: torch.compile(Parent(module), dynamic=True, **options),
    "forward": lambda module, **options: torch.compile(module.forward, **options),
    "forward, called": lambda module, **options: torch.compile(lambda x: module.forward(x) * 1, **options),
    "call": lambda module, **options: torch.compile(lambda x: module.call("forward", x), **options),
    "run": lambda module, **options: torch.compile(lambda x: module.run("forward", [x]), **options),
    "measure": lambda module, **options: torch.compile(
        lambda x: (module.measure(x), module(x))[1], **options
    ),
}


def plain(name, module):
    """What a way to compile makes of the module in memory."""
    if "parent" in name or "sizes" in name:
        return Parent(module)(X)
    return module(X).relu() if "sequence" in name else module(X)


@pytest.mark.parametrize("name", COMPILED)
def test_dynamo_leaves_a_streamed_module_alone(model, streamed, name):
    compiled = COMPILED[name](streamed, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(X), plain(name, model))
    stats, plan = streamed.stats, streamed.plan
    assert stats.bytes_moved <= (stats.passes + 1) * plan.streamed_bytes + plan.budget  # the usual bytes
    assert streamed.stats.misses == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_other_backends_leave_it_alone_too(model, program, backend):
    """The parent is one product, for which Inductor compiles no C++."""
    head = Parent(model).head
    with program.load("40%", arena="contiguous") as streamed:
        parent = torch.compile(nn.Sequential(head, streamed, head), backend=backend)
        assert torch.equal(parent(X), head(model(head(X))))
        assert torch.equal(torch.compile(streamed, backend=backend)(X), model(X))
        streamed.compile(backend=backend)
        assert torch.equal(streamed(X), model(X))
        assert streamed.stats.misses == 0


def test_a_graph_that_may_not_break_is_an_error_that_says_why(model, streamed):
    with pytest.raises(Exception, match=r"weights come and go while it runs.*leave out fullgraph=True"):
        torch.compile(Parent(streamed), backend="eager", fullgraph=True)(X)
    assert torch.equal(streamed(X), model(X))


@pytest.mark.parametrize("engine", ENGINES)
def test_methods_of_a_program_are_left_alone(model, tmp_path, engine):
    methods = {"prefill": export(model, (LONGER,)), "decode": export(model, (X,))}
    program = penstock.compile(methods, tmp_path / "m.penstock")
    with program.load("40%", engine=engine, arena="contiguous") as module:

        def both(x, longer):
            return module.decode(x), module.call("prefill", longer)

        outputs = torch.compile(both, backend="aot_eager")(X, LONGER)
        assert torch.equal(outputs[0], model(X))
        assert torch.equal(outputs[1], model(LONGER))
        assert torch.equal(torch.compile(module.decode, backend="aot_eager")(X), model(X))
        assert module.stats.misses == 0


def test_what_opens_plans_and_loads_is_left_alone(model, program):
    def whole(x):
        opened = penstock.open(program.path)
        with opened.load(plan=opened.plan("60%", arena="contiguous")) as module:
            return module(x) * 1, module.stats.misses

    output, misses = torch.compile(whole, backend="aot_eager")(X)
    assert torch.equal(output, model(X))
    assert misses == 0


@pytest.mark.nightly
@pytest.mark.usefixtures("compiler")
def test_compiled_code_is_left_alone_and_refused_alike(model, tmp_path):
    compiled = penstock.compile(
        export(model, (X,)), tmp_path / "c.penstock", lowering="inductor", resident_below="1KiB"
    )
    with compiled.load("40%", arena="contiguous") as module:
        expected = module(X)
        parent = torch.compile(Parent(module), backend="eager")
        assert torch.equal(parent(X), Parent(nn.Identity()).head(expected) + 0)
        assert module.stats.misses == 0
        for refused in ("torch.jit.trace", "make_fx", "vmap", "torch.export"):
            with pytest.raises(StreamError):
                REFUSED[refused](module)
        with forward_ad.dual_level(), pytest.raises(StreamError, match="tangent"):
            module(forward_ad.make_dual(X, X))
        assert torch.equal(module(X), expected)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("kinds") / "written.penstock"
    return penstock.compile_training(Written(), path, trainable=["blocks.1.up.weight"], example=(X,))


def step(model, call):
    """The output of a call, the gradient of the weight that is trained, and the statistics after it."""
    weight = model.get_parameter("blocks.1.up.weight")
    weight.grad = None
    output = call(X)
    (output * output.detach().cos()).sum().backward()
    return output.detach(), weight.grad, model.get_buffer("norm.running_mean").clone()


@pytest.mark.parametrize("way", ["itself", "a parent", "with its backward"])
def test_a_module_that_is_trained_is_left_alone(trained, way):
    model = Written()
    with torch.enable_grad(), trained.load("60%", arena="contiguous") as module:
        expected = step(model, nn.Sequential(model, nn.ReLU()))

        def whole(x):
            output = module(x).relu()
            (output * output.detach().cos()).sum().backward()
            return output

        if way == "with its backward":
            output = torch.compile(whole, backend="aot_eager")(X)
            weight, mean = module.get_parameter("blocks.1.up.weight"), module.get_buffer("norm.running_mean")
            got = output.detach(), weight.grad, mean
        else:
            compiled = torch.compile(module, backend="aot_eager")
            call = (lambda x: compiled(x).relu()) if way == "itself" else nn.Sequential(module, nn.ReLU())
            got = step(module, call if way == "itself" else torch.compile(call, backend="aot_eager"))
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        assert module.stats.misses == 0


@pytest.mark.usefixtures("compiler")
def test_the_backend_of_penstock_leaves_a_streamed_child_alone(model, program, tmp_path):
    parent = Parent(nn.Identity())
    save_file(
        {k: v for k, v in parent.state_dict().items() if k.startswith("head")}, tmp_path / "p.safetensors"
    )
    with program.load("40%", arena="contiguous") as streamed:
        plain_parent = Parent(streamed)
        expected = plain_parent.head(model(X)) + 0
        record = penstock.offload(plain_parent, tmp_path / "p.safetensors")
        options = {"budget": "100%", "resident_below": "1KiB"}
        compiled = torch.compile(plain_parent, backend="penstock", options=options)
        assert torch.equal(compiled(X), expected)
        assert streamed.stats.misses == 0
        record.close()


def test_apply_stays_right_under_dynamo(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).eval().requires_grad_(False)
    expected, parent = model(X), Parent(model)
    with apply(model, "2MB", cache=tmp_path):
        assert torch.equal(torch.compile(model, backend="eager")(X), expected)
        assert torch.equal(torch.compile(model.forward, backend="eager")(X), expected)
        assert torch.equal(torch.compile(parent, backend="eager")(X), parent.head(expected) + 0)


def in_fake_mode(module):
    with FakeTensorMode():
        return module(torch.randn(4, 64))


REFUSED = {
    "torch.jit.trace": lambda module: torch.jit.trace(module, (X,)),
    "torch.jit.script": torch.jit.script,
    "torch.jit.script of a parent": lambda module: torch.jit.script(Parent(module)),
    "make_fx": lambda module: make_fx(module)(X),
    "make_fx on fakes": lambda module: make_fx(module, tracing_mode="symbolic")(X),
    "make_fx before dispatch": lambda module: make_fx(Parent(module), pre_dispatch=True)(X),
    "torch.fx.symbolic_trace": lambda module: torch.fx.symbolic_trace(Parent(module)),
    "vmap": lambda module: torch.vmap(module)(X[None]),
    "vmap over rows": lambda module: torch.vmap(Parent(module))(X),
    "grad": lambda module: torch.func.grad(lambda x: module(x).sum())(X),
    "jvp": lambda module: torch.func.jvp(module, (X,), (X,)),
    "jacrev": lambda module: torch.func.jacrev(module)(X),
    "jacfwd": lambda module: torch.func.jacfwd(module)(X),
    "hessian": lambda module: torch.func.hessian(lambda x: module(x).sum())(X),
    "functionalize": lambda module: torch.func.functionalize(module)(X),
    "linearize": lambda module: torch.func.linearize(module, X),
    "torch.export": lambda module: export(module, (X,)),
    "torch.export of a parent": lambda module: export(Parent(module), (X,)),
    "draft_export": lambda module: torch.export.draft_export(module, (X,)),
    "torch.onnx.export": lambda module: torch.onnx.export(module, (X,), tempfile.mkdtemp(), dynamo=False),
    "FakeTensorMode": in_fake_mode,
    "a FakeTensor": lambda module: module(FakeTensorMode().from_tensor(X)),
    "functional_call": lambda module: functional_call(module, {"0.up.weight": torch.zeros(256, 64)}, (X,)),
    "functional_call, untied": lambda module: functional_call(
        module, {"weight": torch.zeros(256, 64)}, (X,), tie_weights=False
    ),
    "functional_call of a parent": lambda module: functional_call(
        Parent(module), {"child.1.down.bias": torch.zeros(64)}, (X,)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tracers_are_refused_in_one_sentence(model, streamed, name):
    with pytest.raises(StreamError) as refused:
        REFUSED[name](streamed)
    said = str(refused.value)
    assert "\n" not in said
    assert ". " not in said
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert torch._C._get_tracing_state() is None
    assert not _get_current_dispatch_mode_stack()
    assert torch.equal(streamed(X), model(X))
    assert torch.equal(torch.vmap(torch.sin)(X), X.sin())
    assert streamed.stats.misses == 0


APPLIED = [name for name in REFUSED if name.startswith(("make_fx", "torch.export", "draft", "torch.onnx"))]


@pytest.mark.parametrize("train", [False, True])
def test_tracers_of_a_model_that_was_given_to_apply_are_refused(tmp_path, train):
    """An export left a plan of tensors without values, and the model returned such tensors from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).requires_grad_(False)
    if train:
        model.append(nn.LayerNorm(64))
    expected = model(X)
    words = (
        r"cannot record a model whose weights come and go.* \(restore\(\) what apply returned, or load the"
    )
    options = LoadOptions(arena="contiguous", poison=True)
    with apply(model, "2MB", train=train, cache=tmp_path, options=options):
        for name in [*APPLIED, "torch.jit.trace", "FakeTensorMode", "a FakeTensor"] * 2:
            with pytest.raises(StreamError, match=words):
                REFUSED[name](model)
            assert not _get_current_dispatch_mode_stack()
            assert torch.equal(model(X), expected)
            assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected)
    assert export(model, (X,))


def test_a_strict_export_says_why(model, program):
    with program.load("40%") as streamed:
        with pytest.raises(Exception, match="weights come and go while it runs"):
            export(Parent(streamed), (X,), strict=True)
        assert torch.equal(streamed(X), model(X))


def test_what_a_transform_does_not_touch_runs(model, streamed):
    """The transform is of other tensors, and the module's inputs are plain ones."""
    expected = model(X)
    assert torch.equal(torch.vmap(lambda y: streamed(X) + y)(torch.zeros(3, 1, 1))[2], expected)
    gradient = torch.func.grad(lambda scale: (streamed(X) * scale).sum())(torch.ones(4, 64))
    assert torch.equal(gradient, expected)
    parent = Parent(streamed)
    given = dict(parent.named_parameters())
    assert torch.equal(functional_call(parent, given, (X,)), parent.head(expected) + 0)
    assert torch.equal(functional_call(streamed, {}, (X,)), expected)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        assert torch.equal(streamed(X), expected)
    assert counter.get_total_flops() > 0


def test_tangents_go_through_eager_programs(model, streamed):
    with forward_ad.dual_level():
        got, expected = (forward_ad.unpack_dual(one(forward_ad.make_dual(X, X))) for one in (streamed, model))
    assert torch.equal(got.primal, expected.primal)
    assert torch.equal(got.tangent, expected.tangent)


def test_functional_call_of_what_is_trained(trained):
    model = Written().eval()
    with trained.load("60%", arena="contiguous") as module:
        module.eval()
        new = {name: value.detach() * 2 for name, value in module.named_parameters()}
        own = {name: value.detach() for name, value in module.named_buffers()}
        assert torch.equal(functional_call(module, new | own, (X,)), functional_call(model, new, (X,)))
        frozen = {"blocks.0.up.weight": torch.zeros(256, 64)}
        beside = {"blocks.1.up.bias": torch.zeros(256)}
        others = {name: value.clone() for name, value in module.named_buffers()}
        for refused in (frozen, beside, others):
            with pytest.raises(StreamError, match="functional_call"):
                functional_call(module, refused, (X,))
        for transform in (torch.func.grad, torch.func.jacrev):
            with torch.enable_grad(), pytest.raises(StreamError, match="grad"):
                transform(lambda new: functional_call(module, new, (X,)).sum())(new)
        with contextlib.suppress(StreamError):
            torch.vmap(module)(X[None])
        assert torch.equal(module(X), copy.deepcopy(model)(X))
