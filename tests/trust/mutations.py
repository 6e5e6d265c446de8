"""Mutations of files: of their bytes, and of the values in JSON. Equal seeds give equal mutations."""

import json

NUMBERS = (0, 1, -1, 2, 3, 63, 64, 127, 255, 4096, 2**31 - 1, 2**32, 2**40, 2**50, 2**63 - 1, 2**64, 10**30)
TEXTS = ("", "x", "float32", "qint8", "../x", "/etc/passwd", "a.b", "__class__", "\x00", "\u00e9", "9" * 50)
VALUES = (
    "null",
    "true",
    "false",
    "0.5",
    "1e308",
    "[]",
    "{}",
    "[[]]",
    '"x"',
    "0",
    "-1",
    "[0]",
    '{"a": 1}',
    '["x"]',
)
"""Values of JSON, as text: each use is a value of its own."""


def mutate_bytes(chosen, data):
    """Changes one place or a few: bits, numbers, ends, copies of other places."""
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 1, 2, 5))):
        place = chosen.randrange(len(changed) + 1)
        what = chosen.randrange(7)
        if what == 0 and place < len(changed):
            changed[place] ^= 1 << chosen.randrange(8)
        elif what == 1:
            changed[place : place + 1] = bytes([chosen.randrange(256)])
        elif what == 2:
            del changed[place : place + chosen.choice((1, 2, 8, 64, 1024))]
        elif what == 3:
            other = chosen.randrange(len(changed) + 1)
            changed[place:place] = changed[other : other + chosen.choice((1, 4, 16, 256))]
        elif what == 4:
            width = chosen.choice((1, 2, 4, 8))
            number = chosen.choice(NUMBERS) % (1 << 8 * width)
            changed[place : place + width] = number.to_bytes(width, "little")
        elif what == 5:
            del changed[place:]
        else:
            changed[place:place] = bytes(chosen.choice((1, 8, 100)))
    return bytes(changed)


def mutate_json(chosen, data):
    """Changes one value or a few of JSON, which stays JSON: other numbers, texts, types, places, copies."""
    tree = json.loads(data)
    mutate_tree(chosen, tree)
    return json.dumps(tree).encode()


def mutate_tree(chosen, tree):
    """Does what `mutate_json` does to the value of a document, in place."""
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            break
        holder, key = chosen.choice(places)
        what = chosen.randrange(6)
        if what == 0:
            holder[key] = _near(chosen, holder[key])
        elif what == 1:
            holder[key] = json.loads(chosen.choice(VALUES))
        elif what == 2:
            del holder[key]
        elif what == 3:
            other, there = chosen.choice(places)
            holder[key] = json.loads(json.dumps(other[there])) if _is_in(other, there) else None
        elif what == 4 and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        elif isinstance(holder, dict):
            holder[chosen.choice((*TEXTS, *holder))] = json.loads(json.dumps(holder[key]))


def exchange(chosen, tree):
    """Gives a value of a document the place of another one of the same key and type, or of both each other's.

    Unlike most values, such values are often valid where they come to stand.
    """
    alike = {}
    for holder, key in _places(tree):
        name = key if isinstance(holder, dict) else (id(holder) if chosen.random() < 0.5 else "item")
        alike.setdefault((name, type(holder[key])), []).append((holder, key))
    several = [places for places in alike.values() if len(places) > 1]
    if not several:
        return
    (one, here), (other, there) = chosen.sample(chosen.choice(several), 2)
    first, second = (json.loads(json.dumps(value)) for value in (one[here], other[there]))
    one[here] = second
    if chosen.random() < 0.5 and _is_in(other, there):
        other[there] = first


def _places(tree):
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from _places(tree[key])


def _is_in(holder, key):
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _near(chosen, value):
    """A value of the same type, near or far."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chosen.choice((value + 1, value - 1, -value, value * 2, value // 2, chosen.choice(NUMBERS)))
    if isinstance(value, float):
        return chosen.choice((-value, value * 1e9, 0.0))
    if isinstance(value, str):
        at = chosen.randrange(len(value) + 1)
        return chosen.choice((value[:at] + value[at + 1 :], value[:at] + "(" + value[at:], *TEXTS))
    return json.loads(chosen.choice(VALUES))
