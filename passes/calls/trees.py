"""The structures of inputs and results as JSON: lists, tuples, dictionaries, and classes that torch knows.

The JSON is torch's own. torch imports modules to read it, whose names it takes from the text; here nothing is
imported, and a class is one that has been registered in this process.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from penstock.passes.calls.records import refuse
from penstock.schedule.facts.errors import TRUST, PassError

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
