"""The judge of `make fuzz` over whole artifacts: what it lets pass, and what it would find."""

import json
from functools import partial

import pytest

import penstock
from tests.trust.whole_artifacts import WrongBitsError, wholes


def changed(change):
    """A case of the plain artifact with plans."""
    document = json.loads(wholes().documents[1])
    change(document)
    return json.dumps(document).encode()


def test_what_is_not_changed_has_the_bits_of_its_program():
    for document in set(wholes().documents):
        wholes().use(document)


def test_another_program_has_its_own_bits():
    def other(document):
        (row,) = (one for one in document["code"]["graph"]["nodes"] if one[2] == "aten.relu.default")
        row[2] = "aten.neg.default"

    wholes().use(changed(other))


def test_memory_that_nobody_has_filled_would_be_found(monkeypatch):
    """Steps that come later than the graph reads, where nothing follows the graph.

    What `linear_2` reads arrives behind the step before, which then is its own: no earlier, on any machine.
    """
    later = {"linear_1": "linear_2", "linear_2": "add"}

    def late(document, again=0):
        document["again"] = again
        payload = document["payload"]
        for traces in (payload["traces"], *(plan["traces"] for plan in payload["plans"])):
            for trace in traces:
                for step in trace["steps"]:
                    step["name"] = later.get(step["name"], step["name"])
        payload["plans"] = [one for one in payload["plans"] if one["arena"]["kind"] == "contiguous"][:1]

    with pytest.raises(penstock.PayloadError, match="read by linear_1, and no step"):
        wholes().use(changed(late))
    monkeypatch.setattr("penstock.passes.lowering.archive.check_uses", lambda *_: None)

    def use():
        for again in range(4):  # one in twenty documents is planned anew, which is right
            wholes().use(changed(partial(late, again=again)))

    with pytest.raises(WrongBitsError):
        use()
