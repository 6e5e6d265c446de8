"""The operators that a stored graph may call, by name.

A name is an exact overload under `torch.ops` (`aten.add.Tensor`), an operator of higher order
(`higher_order.cond`), or a function of FUNCTIONS (`_operator:getitem`). Nothing else can be said: no module
is imported and no attribute looked up for a name that a file has.

An artifact may come from a stranger. Unless its reader trusts it, its names are limited to operators that
compute tensors from tensors and numbers: those of torch that LIBRARIES, the types of their arguments, and
`_is_public` admit, those of libraries that penstock works with, and penstock's own. None of them opens a
file, calls what it is given, or takes memory for an address.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from penstock.passes.calls.records import refuse
from penstock.passes.graph import in_place
from penstock.schedule.facts.errors import TRUST, PassError

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

_OF_TORCH = frozenset(("aten", "prims", in_place.NAMESPACE))

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
    if namespace == in_place.NAMESPACE:
        return in_place.named(packet_name, overload)  # declared when it is first asked for
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
