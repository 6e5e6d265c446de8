"""An FX graph as JSON, and back: the operators, arguments and structures that are run, and nothing else."""

from __future__ import annotations

import builtins
import json
import keyword
import math
import operator
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from penstock.passes.calls.inputs import ConstantLeaf, Dimension, NumberLeaf, TensorLeaf, checked, refuse
from penstock.passes.graph import dry_run
from penstock.passes.graph.nodes import TRANSFER, is_transfer
from penstock.schedule.facts.errors import TRUST, PassError
from penstock.schedule.payload.text import short

_SYMBOLIC = tuple(
    f"{prefix}sym_{name}"
    for prefix, names in (
        ("", "float int ite max min not sqrt sum"),
        ("_", "acos asin atan cos cosh log2 sin sinh sqrt tan tanh"),
    )
    for name in names.split()
)

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"{called}:{name}": getattr(module, name)
    for called, module, names in (
        ("builtins", builtins, "abs bool float int max min pow round"),
        ("math", math, "ceil floor log2 sqrt trunc"),
        ("torch", torch, " ".join(name for name in _SYMBOLIC if hasattr(torch, name))),
        (
            *("_operator", operator),
            "add and_ eq floordiv ge getitem gt le lt mod mul ne neg not_ or_ pos pow sub truediv",
        ),
    )
    for name in names.split()
}
"""Functions on numbers that graphs call, by the name of their module and their own."""

_CONTROL = """
associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention flex_attention_backward
map_impl out_dtype penstock_by_expert penstock_segment_gradients scan while_loop wrap_with_autocast
wrap_with_set_grad_enabled
"""
"""The operators of higher order that may be called: they run bodies of the graph, or an operator it names."""

_OF_TORCH = frozenset(("aten", "prims", dry_run.NAMESPACE))

LIBRARIES = _OF_TORCH | {"quantized_decomposed", "torchao", "torchvision", "transformers"}
"""The namespaces of torch, and of libraries that penstock works with, in which artifacts find operators."""

_OWN = frozenset(("penstock.store.default", "penstock.random_state.default"))
"""penstock's operators in stored graphs. The probes are put in when a program is loaded, by its trace."""

_DATA = frozenset(("Tensor", "int", "float", "bool", "number", "str", "Device", "Generator"))
"""The types of arguments and results, alone, optional or in lists, of operators that compute."""

_REFUSED = re.compile(
    # Opens a file; prints; changes the memory of a tensor; has a flag to check nothing; run autograd.
    "from_file|_print|set|set_.*|segment_reduce|backward|dist_backward|grad"
    # Take memory of a form that torch does not check: packed, sparse and nested tensors, other libraries'.
    "|(cudnn|fbgemm|miopen|mkldnn|mps|quantized|sparse|nested|to_sparse|to_padded|to_mkldnn|_mkldnn)_.*"
    "|.*_(unsafe|sparse)|lift_fresh_unsafe|resize_as_sparse_|.*_tensor_unsafe"
)

_ASSUMES = re.compile("_assert_scalar|sym_constrain_range(_for_size)?")
"""The operators without tensors that may be called: assumptions about sizes. Others are TorchScript's own."""

_PRIVATE = re.compile(
    "__(and|iand|or|ior|xor|ixor|lshift|ilshift|rshift|irshift)__"
    "|_(adaptive_avg_pool|assert_|batch_norm_|cast_|cdist_|embedding_bag|fake_quantize_|fft_|foreach_|functional_assert_"
    "|functional_sym_constrain_|fused_rms_norm|grid_sampler_2d_cpu_fallback|linalg_|log_softmax|masked_softmax"
    "|native_batch_norm_legit|pdist_|prelu_kernel|scaled_dot_product_|scaled_grouped_mm|scaled_mm|softmax|thnn_"
    "|trilinear|unsafe_|upsample_|weight_int|weight_norm).*"
    "|_(add_relu|add_relu_|addmm_activation|aminmax|chunk_cat|conj|conj_copy|conj_physical|conj_physical_"
    "|convert_weight_to_int4pack|convert_weight_to_int4pack_for_cpu|convolution|convolution_mode|ctc_loss|ctc_loss_backward"
    "|dim_arange|dirichlet_grad|dyn_quant_matmul_4bit|dyn_quant_pack_4bit_weight|efficientzerotensor|euclidean_dist"
    "|fused_dropout|fused_sdp_choice|grouped_mm|int_mm|is_all_true|is_any_true|lazy_clone|local_scalar_dense"
    "|logcumsumexp|masked_scale|native_multi_head_attention|neg_view|neg_view_copy|pad_circular|pad_enum"
    "|reshape_alias|reshape_alias_copy|reshape_copy|safe_softmax|sample_dirichlet|shape_as_tensor|stack"
    "|standard_gamma|standard_gamma_grad|to_copy|to_cpu|transform_bias_rescale_qkv|transformer_encoder_layer_fwd"
    "|unique|unique2)"
)
"""The operators of torch with an underscore in front, its own internals, that exported programs call."""


def name_of(target: Any) -> str:
    """The stored name of an operator. Raises PassError for a function that has none."""
    if isinstance(target, OpOverload):
        name = f"{target.namespace}.{target._opname}.{target._overloadname}"
    elif isinstance(target, HigherOrderOperator):
        name = f"higher_order.{target.__name__}"
    else:
        name = f"{getattr(target, '__module__', '')}:{getattr(target, '__name__', '')}"
    try:
        function = operator_of(name, trust=True)
    except PassError:
        function = None
    if function is not target:
        raise PassError(f"{target} is no operator that has a name: it has no JSON")
    return name


def operator_of(name: object, *, trust: bool) -> Callable[..., Any]:
    """The operator of a stored name, which must be registered in this process.

    With `trust` it may be any that is registered, and otherwise one that may run for a stranger. Raises
    PassError for all others.
    """
    if not isinstance(name, str):
        refuse(name, "name of an operator")
    function = FUNCTIONS.get(name) or _registered(name)
    if function is None:
        raise PassError(f"there is no operator {name:.200}: import the library that registers it first")
    if not trust and name not in FUNCTIONS and not _is_admitted(name, function):
        raise PassError(
            f"the program calls {name:.200}, which is none of the operators that run for anybody: {TRUST}"
        )
    return function


def _registered(name: str) -> OpOverload | HigherOrderOperator | None:
    parts = name.split(".")
    if not all(part.isidentifier() and part.isascii() for part in parts):
        return None
    if len(parts) == 2 and parts[0] == "higher_order":
        candidate = getattr(torch.ops.higher_order, parts[1], None)
        return (
            candidate
            if isinstance(candidate, HigherOrderOperator) and candidate.__name__ == parts[1]
            else None
        )
    if len(parts) != 3 or hasattr(type(torch.ops), parts[0]):
        return None
    namespace, packet_name, overload = parts
    if namespace == dry_run.NAMESPACE:
        return dry_run.named(packet_name, overload)  # declared when it is first asked for
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    named = getattr(packet, overload) if overload in overloads else None
    return named if isinstance(named, OpOverload) else None


def _is_admitted(name: str, function: Any) -> bool:
    if isinstance(function, HigherOrderOperator):
        return function.__name__ in _CONTROL.split()
    if function.namespace not in LIBRARIES:
        return name in _OWN
    schema = function._schema
    named = (str(place.type) for place in (*schema.arguments, *schema.returns))
    types = {re.sub(r"Optional\[|List\[|\]", "", type_name) for type_name in named}
    if not types <= _DATA or not ("Tensor" in types or _ASSUMES.fullmatch(function._opname)):
        return False
    return function.namespace not in _OF_TORCH or _is_public(function._opname)


def _is_public(name: str) -> bool:
    """Tells whether an operator of torch is one that programs call, and checks what it is given."""
    if _REFUSED.fullmatch(name):
        return False
    return not name.startswith("_") or _PRIVATE.fullmatch(name) is not None


_DEEPEST = 100
"""The most levels of a structure."""


def encode_tree(spec: pytree.TreeSpec) -> str:
    """A structure as text. Raises PassError for a class that is registered without a name."""
    try:
        return pytree.treespec_dumps(spec)
    except NotImplementedError as error:  # as torch says it
        raise PassError(f"a structure of values has no form in JSON: {error}") from None


def decode_tree(text: object, *, trust: bool = False) -> pytree.TreeSpec:
    """The structure that `encode_tree` stored.

    With `trust`, torch reads it, which imports what the text names. Raises PassError for text that is none,
    and for a class that nothing has registered in this process.
    """
    if not isinstance(text, str):
        refuse(text, "structure of values")
    if trust:
        try:
            return pytree.treespec_loads(text)
        except NotImplementedError as error:
            raise PassError(f"{error} Import the library that has the class first") from None
    try:
        version, stored = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        refuse(text, "structure of values")
    if version != 1:
        refuse(version, "version of a structure of values, which is 1")
    return _decode(stored, 0)


def _decode(stored: Any, depth: int) -> pytree.TreeSpec:
    if (
        depth > _DEEPEST
        or not isinstance(stored, dict)
        or stored.keys() != {"type", "context", "children_spec"}
    ):
        refuse(stored, "structure of values")
    name, context, children = stored["type"], stored["context"], stored["children_spec"]
    if not isinstance(children, list):
        refuse(children, "list of structures")
    if name is None and context is None and not children:
        return pytree.tree_structure(0)
    specs = [_decode(child, depth + 1) for child in children]
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        # In torch's words, by which `with_types` finds what to import.
        raise PassError(
            f"Deserializing {name} in pytree is not registered: import the library that has it first"
        )
    return pytree.TreeSpec(kind, _context(kind, name, context, len(specs)), specs)


def _context(kind: Any, name: str, stored: Any, children: int) -> Any:
    """What the class of a structure keeps beside its children: of a dictionary the keys, often nothing."""
    from_context = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    if kind is namedtuple:
        context = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(stored) if isinstance(stored, str) else None
        names = getattr(context, "_fields", None)
        fits = isinstance(names, tuple) and len(names) == children
    elif kind is defaultdict or from_context is not None or not isinstance(stored, str):
        # torch, or the class itself, would look up what the text names.
        raise PassError(
            f"the results or inputs are in a {name}, whose file could name any module to import: {TRUST}"
        )
    else:
        try:
            context = json.loads(stored)
        except (ValueError, RecursionError):
            refuse(stored, f"context of a {name}")
        fits = _fits(kind, context, children)
    if not fits:
        refuse(stored, f"context of a {name} of {children}")
    return context


def _fits(kind: Any, context: Any, children: int) -> bool:
    if kind in (tuple, list):
        return context is None
    if kind in (dict, OrderedDict):
        plain = isinstance(context, list) and all(
            isinstance(key, str | int | float | bool | None) for key in context
        )
        return plain and len(set(context)) == len(context) == children
    if kind is deque:
        return context is None or (type(context) is int and context >= children)
    return _is_plain(context)


def _is_plain(value: Any) -> bool:
    """Tells whether a value of JSON is of texts, numbers and lists alone, which name no class."""
    if isinstance(value, list):
        return all(_is_plain(element) for element in value)
    return isinstance(value, str | int | float | bool | None)


Bodies = dict[str, fx.GraphModule]
"""The bodies of control flow, by the names that the graph's `get_attr` nodes give them."""


def encode_graph(graph_module: fx.GraphModule) -> dict[str, Any]:
    """The graph of a module, the bodies of its control flow included, in plain JSON values.

    Raises PassError for a node or value that `decode_graph` could not make again.
    """
    if type(graph_module.graph._codegen) is not CodeGen:
        raise PassError("a graph that flattens its own arguments has no JSON")
    used = [str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"]
    bodies: Bodies = {}
    for name in used:
        body = getattr(graph_module, name, None)
        if not isinstance(body, fx.GraphModule):
            raise PassError(f"{name} is no body of control flow but a {type(body).__name__}: it has no JSON")
        bodies[name] = body
    return {
        "nodes": [_encode_node(node) for node in graph_module.graph.nodes],
        "bodies": {name: encode_graph(body) for name, body in bodies.items()},
    }


def check_operators(stored: Any, *, trust: bool) -> None:
    """Raise PassError for an operator of a stored graph that is unknown, or not for everybody."""
    for name in operators_in(stored):
        operator_of(name, trust=trust)


def operators_in(stored: Any) -> set[str]:
    """The names of the operators of a stored graph and its bodies. Raises PassError for JSON that is none."""
    called = _called(_checked_nodes(stored))
    return called.union(*(operators_in(body) for body in stored["bodies"].values()))


def decode_graph(stored: Any, *, trust: bool = False) -> tuple[fx.Graph, Bodies]:
    """A new graph, which no module owns yet, and the bodies that its `get_attr` nodes name.

    Raises PassError for JSON that is no graph, and for an operator that is not registered, as the library
    that registers it must be imported first, or that not everybody may call: only a graph of somebody whom
    its reader trusts may have any.
    """
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    rows = _checked_nodes(stored)
    functions = {name: operator_of(name, trust=trust) for name in _called(rows)}
    values = Values(nodes, trust)
    for op, name, target, args, kwargs, *transfer in rows:
        if name in nodes:
            raise PassError(f"the graph has two nodes {name!r}")
        if op == "get_attr" and target not in stored["bodies"]:
            raise PassError(f"node {name} is the body {target}, which the graph does not have: compile again")
        node = graph.create_node(
            op,
            functions[target] if op == "call_function" else target,
            tuple(decode_value(arg, values) for arg in args),
            {key: decode_value(value, values) for key, value in kwargs.items()},
            name,
        )
        node.name = name  # export may name a node like a builtin of Python, which FX itself would not
        if transfer:
            node.meta[TRANSFER] = True
        nodes[name] = node
    bodies = {name: decode_graph(body, trust=trust) for name, body in stored["bodies"].items()}
    return graph, {name: fx.GraphModule(inner, body) for name, (body, inner) in bodies.items()}


_RESERVED = frozenset((*keyword.kwlist, "self", "torch"))
"""Names that mean something else in the code that FX writes."""


def _checked_nodes(stored: Any) -> list[list[Any]]:
    """The nodes of a stored graph. Raises PassError where they could not be written as they are as Python."""
    if not isinstance(stored, dict) or stored.keys() != {"nodes", "bodies"}:
        refuse(stored, "graph")
    rows, bodies = stored["nodes"], stored["bodies"]
    if not isinstance(rows, list) or not isinstance(bodies, dict):
        refuse(stored, "graph")
    _check_names(bodies)
    behind = "placeholder"
    for row in rows:
        if not isinstance(row, list) or len(row) not in (5, 6) or not isinstance(row[2], str):
            refuse(row, "node of a graph")
        op, name, target, args, kwargs, *transfer = row
        if not isinstance(args, list) or not isinstance(kwargs, dict) or transfer not in ([], [True]):
            refuse(row, "node of a graph")
        _check_names((name, *(() if op == "call_function" else (target,))))
        _check_names(kwargs.keys() - {"self"})
        if op not in _OPS or _OPS[op] < _OPS[behind] or (op != "call_function" and (args[1:] or kwargs)):
            raise PassError(f"node {name} is a {short(op)} behind a {behind}: compile again")
        if (op == "placeholder" and args) or (op == "output") != (row is rows[-1]):
            raise PassError(f"node {name} is a {op}, which cannot be where it is: compile again")
        behind = op
    inputs = [row[2] for row in rows if row[0] == "placeholder"]
    if behind != "output" or len(set(inputs)) < len(inputs):
        raise PassError("the graph has no output, or an input twice: compile again")
    return rows


_OPS = {"placeholder": 0, "get_attr": 1, "call_function": 1, "output": 2}
"""The kinds of nodes, and in which part of a graph they stand."""


def _check_names(names: Collection[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or name in _RESERVED:
            refuse(name, "name of a value")


def _called(rows: list[list[Any]]) -> set[str]:
    return {target for op, _, target, *_ in rows if op == "call_function"}


def _encode_node(node: fx.Node) -> list[Any]:
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        raise PassError(f"node {node.name} is a {node.op}: it has no JSON")
    target = name_of(node.target) if node.op == "call_function" else str(node.target)
    kwargs = {name: encode_value(value) for name, value in node.kwargs.items()}
    encoded = [node.op, node.name, target, [encode_value(arg) for arg in node.args], kwargs]
    return [*encoded, True] if is_transfer(node) else encoded


def encode_value(value: Any) -> Any:
    """A value as JSON: the value itself, a list, or an object with one key, which names the kind of value.

    Raises PassError for a value of a kind that is not in `_KINDS`.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [encode_value(element) for element in value]
    for name, kind in _KINDS.items():
        if isinstance(value, kind.type):
            return {name: kind.encode(value)}
    raise PassError(f"{value!r} of type {type(value).__name__} has no JSON")


@dataclass(frozen=True)
class Values:
    """What decoded values may name: nodes, and any operator of this process if who stored them is trusted.

    Those in a graph have the nodes before them; None stands for values elsewhere.
    """

    nodes: Mapping[str, fx.Node] | None
    trust: bool

    def node(self, name: object) -> fx.Node:
        """A node by name. Raises PassError where there is none before this one."""
        node = self.nodes.get(name) if self.nodes and isinstance(name, str) else None
        if node is None:
            refuse(name, "node before this one")
        return node


_NOTHING = Values(None, trust=False)


def decode_value(value: Any, values: Values = _NOTHING) -> Any:
    """The value that `encode_value` was given. Raises PassError for JSON that is none."""
    if isinstance(value, list):
        return [decode_value(element, values) for element in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or name not in (_KINDS if values.nodes is None else _IN_GRAPHS):
        refuse(value, "value")
    try:
        return _KINDS[name].decode(content, values)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise PassError(f"{short(content)} is no {name} ({short(str(error))}): compile again") from None


@dataclass(frozen=True)
class _Kind:
    """The functions that turn values of a type into JSON, and back."""

    type: type | tuple[type, ...]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Values], Any]


def _encode_items(value: dict[Any, Any]) -> list[Any]:
    return [[encode_value(key), encode_value(element)] for key, element in value.items()]


def _decode_items(content: Any, values: Values) -> dict[Any, Any]:
    if not all(isinstance(key, str | int | None) for key, _ in content):
        refuse(content, "dictionary of names or numbers")
    return {key: decode_value(element, values) for key, element in content}


def _encode_slice(value: slice) -> list[Any]:
    return [encode_value(part) for part in (value.start, value.stop, value.step)]


def _decode_slice(content: Any, values: Values) -> slice:
    start, stop, step = decode_value(content, values)
    return slice(start, stop, step)


def _named(kind: type) -> _Kind:
    """The kind of a type whose values are attributes of torch, such as dtypes."""

    def decode(name: Any, _: Values) -> Any:
        value = vars(torch).get(name)
        if not isinstance(value, kind):
            refuse(name, f"{kind.__name__} of torch")
        return value

    return _Kind(kind, lambda value: str(value).removeprefix("torch."), decode)


def _record(kind: type) -> _Kind:
    """Return the kind of a dataclass: a file holds the values of its fields, in order."""
    names = [field.name for field in fields(kind)]

    def decode(content: Any, values: Values) -> Any:
        decoded = [decode_value(element, values) for element in content]
        return checked(kind(*decoded))

    return _Kind(kind, lambda record: [encode_value(getattr(record, name)) for name in names], decode)


_KINDS = {
    "node": _Kind(fx.Node, lambda node: node.name, lambda name, values: values.node(name)),
    "float": _Kind(float, repr, lambda text, _: float(text)),
    "tuple": _Kind(tuple, lambda v: list(map(encode_value, v)), lambda v, n: tuple(decode_value(v, n))),
    "slice": _Kind(slice, _encode_slice, _decode_slice),
    "dict": _Kind(dict, _encode_items, _decode_items),
    "operator": _Kind(
        (OpOverload, HigherOrderOperator, type),
        name_of,
        lambda name, values: operator_of(name, trust=values.trust),
    ),
    "device": _Kind(torch.device, str, lambda text, _: torch.device(str(text))),
    "dtype": _named(torch.dtype),
    "layout": _named(torch.layout),
    "memory_format": _named(torch.memory_format),
    "tree": _Kind(pytree.TreeSpec, encode_tree, lambda text, values: decode_tree(text, trust=values.trust)),
    **{kind.__name__: _record(kind) for kind in (Dimension, TensorLeaf, NumberLeaf, ConstantLeaf)},
}
"""The kinds of values by their keys in JSON. Subclasses of tuple and dict come back as tuple and dict."""

_IN_GRAPHS = (
    _KINDS.keys() - {kind.__name__ for kind in (Dimension, TensorLeaf, NumberLeaf, ConstantLeaf)} - {"tree"}
)
"""The kinds of values that operators take: FX writes all of them as Python."""
