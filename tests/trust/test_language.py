"""The language of stored programs: what it says Python would say, and what it cannot say is refused."""

import ast
import json
import math
import operator
import random
import sys

import pytest
import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from penstock.passes.calls.expressions import FUNCTIONS, parse
from penstock.passes.calls.stored_graph import FUNCTIONS as OPERATORS
from penstock.passes.calls.stored_graph import (
    decode_graph,
    decode_tree,
    decode_value,
    encode_tree,
    name_of,
    operator_of,
)
from penstock.passes.calls.stored_program import with_types
from penstock.passes.probes import STORE
from penstock.passes.training.rerun import RANDOM_STATE
from penstock.schedule.facts.errors import PassError

NAMES = {"math": math, "torch": torch, "abs": abs, "max": max, "min": min, "round": round}

LEAVES = (torch.empty(4, 7)[1:, ::2], 5, 2.5, torch.empty(1, 3))


OPERANDS = (
    *("s0", "s1", "u2", "7", "1", "0", "2.5", "True", "leaves[0].size()[1]", "leaves[0].stride()[0]"),
    *("leaves[1]", "leaves[2]", "leaves[0].storage_offset()", "leaves[3].shape[1]"),
)


def expression(random, depth):
    """A random expression that Python, too, understands."""
    if depth == 0:
        return random.choice(OPERANDS)
    left, right, third = (expression(random, random.randrange(depth)) for _ in range(3))
    return random.choice(
        (
            *(
                f"{left} {sign} {right}"
                for sign in ["+", "-", "*", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=", "and", "or"]
            ),
            *(f"({left}) {sign} ({right})" for sign in ["+", "-", "*", "/", "//", "%", "==", "<", "<="]),
            *(f"-({left})", f"not ({left})", f"({left} if {third} else {right})", f"({left}) ** 2"),
            *(f"max({left}, {right})", f"min({left}, {right}, {third})", f"abs({left})"),
            *(f"math.floor({left})", f"math.ceil({left})", f"round({left})", f"torch.sym_float({left})"),
        )
    )


def _chained(text):
    return any(isinstance(one, ast.Compare) and len(one.ops) > 1 for one in ast.walk(ast.parse(text)))


@pytest.mark.random
def test_an_expression_is_what_python_says():
    chosen, compared = random.Random(11), 0
    for _ in range(3000):
        text, sizes = expression(chosen, 4), {"s0": chosen.randrange(9), "s1": 3, "u2": chosen.randrange(3)}
        try:
            expected = eval(text, NAMES, {**sizes, "leaves": LEAVES})
        except (ArithmeticError, TypeError, SyntaxError):
            continue
        if _chained(text):
            with pytest.raises(PassError, match="a second comparison"):  # which export never writes
                parse(text)
            continue
        got = parse(text)(sizes, LEAVES)
        assert got == expected or (math.isnan(got) and math.isnan(expected)), text
        assert type(got) is type(expected), text
        compared += 1
    assert compared > 1500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 ** 3 ** 2", 512),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("not 1 == 2", True),
        ("7 // 2 * 2 - 1", 5),
        ("32*s0 + 32*s0*((-1) + s1)", 32 * 4 * 3),
        ("1 if s0 == 4 else 2 if s1 else 3", 1),
        ("s1 == 0 or s0 // s1 == 1", True),
        ("s0 - s0 != 0 and 1 // (s0 - s0) > 0", False),
        ("6 & 3 | 8 ^ 1", 6 & 3 | 8 ^ 1),
        ("1e3 + math.inf", math.inf),
        (" + ".join(["s0"] * 5000), 20000),
    ],
)
def test_operators_bind_as_in_python(text, value):
    assert parse(text)({"s0": 4, "s1": 3}, ()) == value


NO_EXPRESSIONS = r"""
(; 1 2; 1 +; s0); 1 < 2 < 3; s0 if 1; leaves; leaves[s0]; leaves[-1]; max; max(); __import__('os'); __name__
s0.real; leaves[0].__class__; leaves[0].size; leaves[0].data; print(1); open(1); math.factorial(9)
torch.load(1); 'text'; [1]; {1}; lambda: 1; s0 = 1; x := 1; s0, s1; 1 << 2; await s0; f(1); s0(1)
"""
LONG = ("(" * 200 + "1" + ")" * 200, "-" * 5000 + "1", "not " * 5000 + "1", "1" * 60, "1" + "+1" * 60_000)


@pytest.mark.parametrize(
    "text",
    [
        *NO_EXPRESSIONS.strip().replace("\n", "; ").split("; "),
        *("", "1\\\n", "s0;s1", "s\u00e90", "\u0661", *LONG, "s0 if " * 500 + "1"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(PassError, match="is no expression of sizes that penstock knows"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("9 ** 9 ** 9 ** 9", OverflowError),
        ("2.0 ** 2000", OverflowError),
        (" * ".join(["999999999999999999999999999999999999999"] * 9), OverflowError),
        ("round(1, -9 ** 99)", OverflowError),
        ("s0 // 0", ZeroDivisionError),
        ("s9 + 1", KeyError),
        ("leaves[9]", IndexError),
        ("leaves[0] > 1", TypeError),
        ("leaves[1].size()[0]", TypeError),
        ("leaves[0].size()[5]", IndexError),
    ],
)
def test_an_expression_without_a_value_takes_no_time_and_no_memory(text, error):
    with pytest.raises(error):
        parse(text)({"s0": 1}, LEAVES)


def test_functions_of_expressions_are_of_numbers():
    for name, function in FUNCTIONS.items():
        assert function in (abs, bool, float, int, max, min) or name.startswith(("math.", "round", "torch."))
        assert getattr(function, "__module__", "") in (
            "builtins",
            "math",
            "penstock.passes.calls.expressions",
        )


REFUSED = """
aten.from_file.default aten.set_.source_Tensor aten.set.source_Tensor aten._print.default aten.save.default
aten.record_stream.default aten.backward.default aten.grad.default aten.warn.default aten.manual_seed.int
aten._sparse_coo_tensor_unsafe.default aten._nested_view_from_buffer.default aten._index_put_impl_.default
aten.fbgemm_linear_fp16_weight.default aten.quantized_lstm_cell.default aten.segment_reduce.default
aten._make_per_tensor_quantized_tensor.default aten._test_string_default.default
inductor._reinterpret_tensor.default inductor._alloc_from_pool.default
profiler._record_function_enter_new.default quantized.linear_prepack.default c10d.send.default
_c10d_functional.all_reduce.default penstock.acquire.default penstock.release.default
mkldnn._linear_pointwise.default higher_order.call_torchbind higher_order.inductor_compiled_code
higher_order.print higher_order.run_const_graph
"""

NOTHING = """
 builtins:eval builtins:exec builtins:open builtins:getattr builtins:__import__ builtins:type torch:load
torch:os.system _operator:attrgetter _operator:methodcaller _operator:call _operator:setitem math:factorial
os:system torch:ops aten.add aten.add.Tensor.__class__ aten.add.__class__ aten.add.overloads
aten.__class__.mro aten..Tensor .. higher_order.__class__ higher_order._ops load_library.a.b
import_module.os.system __class__.a.b penstock_in_place.set_.source_Tensor penstock_in_place.__class__.mro
nobody.has.this
"""


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_does_not_compute_runs_for_who_is_trusted_only(name):
    with pytest.raises(PassError, match=r"trust=True|there is no operator"):
        operator_of(name, trust=False)
    assert not _exists(name) or name_of(operator_of(name, trust=True)) == name


def test_most_that_is_refused_exists():
    """The names above are of operators, so that it is no other reason for which they are refused."""
    with pytest.raises(
        PassError, match=r"aten\.from_file\.default, which is none of the operators that run for"
    ):
        operator_of("aten.from_file.default", trust=False)
    exist = [name for name in REFUSED.split() if _exists(name)]
    assert len(exist) > len(REFUSED.split()) * 0.8, sorted(set(REFUSED.split()) - set(exist))


def _exists(name):
    try:
        return operator_of(name, trust=True) is not None
    except PassError:
        return False


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", [*NOTHING.split(), "aten.add.Tensor\n"])
def test_a_name_looks_nothing_up(name, trust):
    with pytest.raises(PassError, match="there is no operator"):
        operator_of(name, trust=trust)


@pytest.mark.parametrize("name", [7, None, ["aten.add.Tensor"], {}])
def test_a_name_is_text(name):
    with pytest.raises(PassError, match="is no name of an operator"):
        operator_of(name, trust=False)


COMPUTE = """
aten.linear.default aten.add.Tensor aten.add_.Tensor aten.scaled_dot_product_attention.default
aten.einsum.default aten._grouped_mm.default aten._to_copy.default aten._softmax.default
aten._unsafe_view.default aten.lstm.input aten._assert_scalar.default aten._assert_tensor_metadata.default
aten.sym_size.int aten._weight_int8pack_mm.default aten._native_batch_norm_legit.default
aten.convolution_backward.default aten.upsample_nearest2d.vec prims.convert_element_type.default
penstock.store.default penstock.random_state.default penstock_in_place.bernoulli_.float higher_order.cond
higher_order.scan higher_order.while_loop higher_order.wrap_with_autocast _operator:getitem math:ceil
builtins:max torch:sym_max torch:sym_float
"""


def test_operators_that_programs_call_run_for_anybody():
    for name in COMPUTE.split():
        assert name_of(operator_of(name, trust=False)) == name
    assert all(
        module in ("builtins", "math", "_operator", "torch")
        for module, _ in (n.split(":") for n in OPERATORS)
    )
    assert operator_of("_operator:add", trust=False) is operator.add
    assert [name_of(STORE), name_of(RANDOM_STATE)] == [
        "penstock.store.default",
        "penstock.random_state.default",
    ]


def test_an_operator_of_nobodys_library_runs_for_who_is_trusted_only():
    library = torch.library.Library("penstock_stranger", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    try:
        name = "penstock_stranger.twice.default"
        with pytest.raises(
            PassError, match=r"calls penstock_stranger\.twice\.default, .*trust=True \(--trust\)"
        ):
            operator_of(name, trust=False)
        assert isinstance(operator_of(name, trust=True), OpOverload)
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"dtype": "load"}, '"load" is no dtype of torch'),
        ({"dtype": ["float32"]}, "is no dtype"),
        ({"layout": "float32"}, "is no layout of torch"),
        ({"device": "os"}, "is no device"),
        ({"device": 3.5}, "is no device"),
        ({"node": "x"}, '"x" is no node before this one'),
        ({"float": "nix"}, "is no float"),
        ({"float": []}, "is no float"),
        ({"slice": [1, 2]}, "is no slice"),
        ({"slice": None}, "is no slice"),
        ({"dict": [[[], 1]]}, "is no dict"),
        ({"dict": [1]}, "is no dict"),
        ({"tuple": 7}, "is no tuple"),
        ({"code": "1"}, "is no value"),
        ({}, "is no value"),
        ({"node": "x", "float": "1"}, "is no value"),
        ({"operator": "builtins:exec"}, "there is no operator"),
        ({"Dimension": ["s", 0, None, 1, None, {"tuple": []}]}, "is no Dimension"),
        ({"Dimension": ["s", 0, None, 1, None, {"tuple": []}, "os.system"]}, "is no expression"),
        ({"Dimension": ["s", 0, None, 1, {"tuple": ["s", 0, 0]}, {"tuple": []}, "s"]}, "has the scale 0"),
        ({"Dimension": ["s", "0", None, 1, None, {"tuple": []}, "s"]}, '"0" is no lower of a Dimension'),
        ({"Dimension": ["s", True, None, 1, None, {"tuple": []}, "s"]}, "true is no lower of a Dimension"),
        ({"Dimension": ["s", 0, None, 1, None, {"tuple": [1]}, "s"]}, "is no symbols of a Dimension"),
        ({"Dimension": [1, 0, None, 1, None, {"tuple": []}, 9]}, "is no Dimension"),
        ({"TensorLeaf": ["x", "float32", "cpu", {"tuple": []}]}, "is no dtype of a TensorLeaf"),
        ({"TensorLeaf": ["x", {"dtype": "float32"}, "cpu", [1]]}, "is no sizes of a TensorLeaf"),
        ({"NumberLeaf": ["x", {"operator": "math:ceil"}, None]}, "is no type of a NumberLeaf"),
        ({"ConstantLeaf": [1, 2]}, "is no name of a ConstantLeaf"),
    ],
)
def test_what_is_no_value_is_refused(value, words):
    with pytest.raises(PassError, match=words):
        decode_value(value)


END = ["output", "output", "output", [None], {}]
X = ["placeholder", "x", "x", [], {}]


def _call(name="y", target="aten.relu.default", args=(), kwargs=None, *more):
    return ["call_function", name, target, list(args), kwargs or {}, *more]


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (None, "is no graph"),
        ([], "is no graph"),
        ({"nodes": [END]}, "is no graph"),
        ({"nodes": {}, "bodies": {}}, "is no graph"),
        ({"nodes": [END], "bodies": []}, "is no graph"),
        ([X], "node x is a placeholder, which cannot be where it is"),
        ([X, ["placeholder", "y", "x", [], {}], END], "has no output, or an input twice"),
        ([_call(args=[{"Dimension": ["s", 0, None, 1, None, {"tuple": []}, "s"]}]), END], "is no value"),
        ([_call(args=[{"tree": "[1, null]"}]), END], "is no value"),
        ([_call(args=[{"dict": [[{"node": "x"}, 1]]}]), END], "is no dictionary of names or numbers"),
        ([END, X], "cannot be where it is|behind a output"),
        ([END, [*END]], "cannot be where it is|behind a output"),
        ([_call(), X, END], "is a .placeholder. behind a call_function"),
        ([["call_method", "y", "__class__", [{"node": "x"}], {}], END], "is a .call_method. behind"),
        ([["call_module", "y", "y", [], {}], END], "is a .call_module. behind"),
        ([["root", "y", "y", [], {}], END], "behind a placeholder"),
        ([["get_attr", "y", "forward", [], {}], END], "is the body forward, which the graph does not have"),
        ([["get_attr", "y", "a.b", [], {}], END], "is no name of a value"),
        ([["placeholder", "x", "*x", [], {}], END], "is no name of a value"),
        ([["placeholder", "x", "x=1", [], {}], END], "is no name of a value"),
        ([["placeholder", "x", "x", [1], {}], END], "cannot be where it is"),
        ([_call("lambda"), END], "is no name of a value"),
        ([_call("self"), END], "is no name of a value"),
        ([_call("torch"), END], "is no name of a value"),
        ([_call("a b"), END], "is no name of a value"),
        ([_call("a\u00e9"), END], "is no name of a value"),
        ([_call(7), END], "is no name of a value"),
        ([_call(kwargs={"a=1, b": 1}), END], "is no name of a value"),
        ([_call(kwargs={"class": 1}), END], "is no name of a value"),
        ([_call(target=7), END], "is no node of a graph"),
        ([_call("y", "aten.relu.default", (), None, False), END], "is no node of a graph"),
        ([["call_function", "y", "aten.relu.default", {}, {}], END], "is no node of a graph"),
        ([["call_function", "y", "aten.relu.default", [], []], END], "is no node of a graph"),
        (["x", END], "is no node of a graph"),
        ([_call(args=[{"node": "y"}]), END], "is no node before this one"),
        ([_call(target="penstock.acquire.default"), END], "none of the operators that run for anybody"),
        ([["output", "output", "output", [1, 2], {}]], "cannot be where it is|is a .output. behind"),
    ],
)
def test_what_is_no_graph_is_refused(stored, words):
    graph = {"nodes": stored, "bodies": {}} if isinstance(stored, list) and stored else stored
    with pytest.raises(PassError, match=words):
        decode_graph(graph)


def test_a_body_is_as_strict():
    inner = {"nodes": [_call(target="builtins:exec", args=["1"]), END], "bodies": {}}
    with pytest.raises(PassError, match="there is no operator"):
        decode_graph({"nodes": [["get_attr", "y", "body", [], {}], END], "bodies": {"body": inner}})
    with pytest.raises(PassError, match="is no name of a value"):
        decode_graph({"nodes": [END], "bodies": {"a.b": {"nodes": [END], "bodies": {}}}})


class Registered:
    """A class that this process has registered."""

    def __init__(self, held):
        self.held = held


pytree.register_pytree_node(
    Registered,
    lambda value: (list(value.held.values()), list(value.held)),
    lambda values, keys: Registered(dict(zip(keys, values, strict=True))),
    serialized_type_name="tests.trust.Registered",
)


@pytest.mark.parametrize(
    "value",
    [1, (1, [2, (3,)]), {"a": 1, 2: [3], True: ()}, {"none": None}, [Registered({"a": 1}), ()]],
    ids=("leaf", "tuple", "dict", "none", "registered"),
)
def test_structures_come_back(value):
    spec = pytree.tree_structure(value)
    assert decode_tree(encode_tree(spec)) == spec == decode_tree(encode_tree(spec), trust=True)


def structure(kind, context, children=()):
    return json.dumps([1, {"type": kind, "context": context, "children_spec": list(children)}])


LEAF = {"type": None, "context": None, "children_spec": []}


def deep(levels):
    text = json.dumps(LEAF)
    for _ in range(levels):
        text = f'{{"type": "builtins.list", "context": "null", "children_spec": [{text}]}}'
    return f"[1, {text}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (7, "is no structure of values"),
        ("", "is no structure of values"),
        ("[1]", "is no structure of values"),
        ("[2, null]", "is no version of a structure"),
        ("[1, null]", "is no structure of values"),
        ('[1, {"type": null}]', "is no structure of values"),
        ("[" * 100_000, "is no structure of values"),
        (deep(500), "is no structure of values"),
        (structure("builtins.tuple", "[1]"), "is no context of a builtins.tuple"),
        (structure("builtins.dict", '["a"]'), "is no context of a builtins.dict of 0"),
        (structure("builtins.dict", '["a", "a"]', [LEAF, LEAF]), "is no context"),
        (structure("builtins.dict", '[["a"]]', [LEAF]), "is no context"),
        (structure("builtins.dict", "[", [LEAF]), "is no context"),
        (structure("builtins.dict", "7", [LEAF]), "is no context"),
        (structure("builtins.dict", {"a": 1}, [LEAF]), "trust=True"),
        (structure("collections.deque", "0", [LEAF]), "is no context"),
        (structure("collections.defaultdict", "{}", []), "trust=True"),
        (structure("collections.namedtuple", "os.stat_result", []), "is no context"),
        (structure("collections.namedtuple", "builtins.tuple", []), "is no context"),
        (
            structure("tests.trust.Registered", '{"__enum__": true, "fqn": "os:system", "name": "x"}'),
            "is no context",
        ),
        (structure("tests.trust.Registered", '[{"__enum__": true}]', [LEAF]), "is no context"),
    ],
)
def test_what_is_no_structure_is_refused(text, words):
    with pytest.raises(PassError, match=words):
        decode_tree(text)


def test_an_unknown_class_imports_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr("importlib.import_module", asked.append)
    for name in (
        "os.system",
        "transformers.models.bert.modeling_bert.BertOutput",
        "diffusers.utils.logging.Any",
    ):
        with pytest.raises(PassError, match="is not registered"):
            with_types(lambda name=name: decode_tree(structure(name, "null")), trust=False)
    assert asked == []
    with pytest.raises(PassError, match="is not registered"):
        with_types(
            lambda: decode_tree(structure("transformers.modeling_outputs.Nobody", "null")), trust=False
        )
    assert asked == ["transformers.modeling_outputs"]  # a module that penstock knows, and that is all
    assert "transformers.models.bert.modeling_bert.BertOutput" not in sys.modules
