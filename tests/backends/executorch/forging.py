"""Writes `.pte` files with other contents under right hashes, as only an author does."""

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

from penstock.backends.executorch.files import PAYLOAD

Change = Callable[[str], str]


def _same(text):
    return text


def fields(change):
    """A change of text that is a change of the JSON in it."""

    def changed(text):
        tree = json.loads(text)
        change(tree)
        return json.dumps(tree)

    return changed


def forge(path, *, region=_same, payload=_same, lost=""):
    """Changes the first region that has weights, the payload that all regions name, or drops named data.

    `lost` is how the keys begin that are dropped.
    """
    pte = deserialize_pte_binary(path.read_bytes())
    named = pte.named_data
    (old,) = (key for key in named.pte_data if key.startswith(PAYLOAD))
    entry = named.pte_data.pop(old)
    named.buffers[entry.buffer_index] = payload(bytes(named.buffers[entry.buffer_index]).decode()).encode()
    new = PAYLOAD + sha256(named.buffers[entry.buffer_index]).hexdigest()
    named.pte_data = {
        key: one
        for key, one in {new: entry, **named.pte_data}.items()
        if not lost or not key.startswith(lost)
    }
    forged = False
    for one in pte.program.backend_delegate_data:
        text = bytes(one.data).partition(b"\n")[2].decode().replace(old, new)
        if not forged and json.loads(text)["appended"]:
            text, forged = region(text), True
        data = text.encode()
        one.data = sha256(data).hexdigest().encode() + b"\n" + data
    binary = serialize_pte_binary(pte, extract_delegate_segments=True, segment_alignment=4096)
    path.write_bytes(bytes(binary))


def deep(text):
    """A million lists, each in the one before, in a field that no reader knows."""
    return '{"more": ' + "[" * 10**6 + "]" * 10**6 + ", " + text.lstrip()[1:]


Tree = dict[str, Any]


def _first(**values):
    return lambda one: one["appended"][0].update(values)


def _shape(dimension, size, **values):
    def change(one):
        one["appended"][0]["shape"][dimension] = size
        one["appended"][0].update(values)

    return change


def _name(one):
    one["appended"][0]["name"] = one["appended"][1]["name"]


_INPUT = {"name": "x", "dtype": "float32", "shape": [1], "device": "cpu", "value": None}
FORGERIES = {
    "inputs that its code checks": (lambda one: one.update(takes=[_INPUT]), "takes"),
    "another graph": (lambda one: one.update(graph=7), "graph"),
    "steps behind the last": (lambda one: one.update(steps=[50, 51]), "steps"),
    "steps of several regions": (lambda one: one.update(steps=[0, 2]), "steps"),
    "steps backwards": (lambda one: one.update(steps=[1, 0]), "steps"),
    "no step for what streams": (lambda one: one.update(steps=[1, 1]), "appended[0].storage"),
    "the step of another region": (lambda one: one.update(steps=[1, 2]), "appended[0].storage"),
    "no such storage": (_first(storage=99), "appended[0].storage"),
    "the name of another weight": (_name, "appended[0].storage"),
    "a weight that is written": (_first(mutable=True), "appended[0].mutable"),
    "another dtype": (_first(dtype="int32"), "appended[0].dtype"),
    "fewer rows": (_shape(0, 1), "appended[0].shape"),
    "rows from the second on": (_shape(0, 1, offset=4), "appended[0].offset"),
    "other strides": (_first(dim_order=[1, 0]), "appended[0].dim_order"),
    "no order": (_first(dim_order=[0, 7]), "appended[0].dim_order"),
    "a negative size": (_shape(0, -4), "appended[0].shape"),
    "more than all memory": (_shape(0, 1 << 30), "appended[0].shape"),
    "more than the storage": (_first(offset=4096), "appended[0].shape"),
    "less than the storage": (_first(offset=-64), "appended[0].shape"),
}
"""Regions that contradict their payload, and the field that the sentence about them names."""
