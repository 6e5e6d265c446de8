"""A `.pte` of a stranger: it is read in a time that grows with its bytes, whatever its lists refer to."""

import io
import struct
from hashlib import sha256

import pytest

import penstock
from penstock.backends.executorch import files, read
from penstock.backends.executorch.files import PAYLOAD, Delegate, Pte, read_ptd
from tests.schedule.payload.payload_example import BYTES
from tests.trust.pte_files import delegate_of, pte_of, read_pte, write_pte

PARTS = Pte(
    {"first": b"some bytes", "second": b"", "third": b"\x00" * 99},
    (
        Delegate("forward", "One", b"its own"),
        Delegate("forward", "Two", b""),
        Delegate("decode", "One", b"x"),
    ),
)


def test_what_is_written_is_read():
    assert read_pte(write_pte(PARTS.named, PARTS.delegates)) == PARTS


def test_bytes_in_the_program_and_in_segments():
    plan = {0: b"forward", 7: [delegate_of("One", 1, inline=True), delegate_of("Two", 0)]}
    data = pte_of({1: [plan], 3: [{}, {0: b"inline"}], 4: [{0: 2, 1: 3}]}, b"segment")
    assert read_pte(data).delegates == (
        Delegate("forward", "One", b"inline"),
        Delegate("forward", "Two", b"gme"),
    )


def test_several_may_have_the_same_segment():
    """ExecuTorch writes equal bytes once."""
    named = [{0: b"first", 1: 0}, {0: b"second", 1: 0}]
    found = read_pte(pte_of({4: [{0: 0, 1: 7}], 7: named}, b"segment")).named
    assert found == {"first": b"segment", "second": b"segment"}
    assert found["first"] is found["second"]


LONG = b"x" * 10_000


def methods(count):
    plan = {0: b"", 7: [delegate_of("", 0)] * count}
    return {1: [plan] * count, 4: [{0: 0, 1: 1}]}


FILES = {
    "delegates": (methods(300), "its lists and texts have more bytes than the file"),
    "texts": ({4: [{}], 7: [{0: LONG}] * 50}, "its lists and texts have more bytes than the file"),
    "bytes in the program": (
        {1: [{7: [delegate_of("", k, inline=True) for k in range(50)]}], 3: [{0: LONG}] * 50},
        "its lists and texts have more bytes than the file",
    ),
    "segments": (
        {4: [{0: 0, 1: 500}] * 50, 7: [{1: k} for k in range(50)]},
        r"its segments have more bytes than",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_lists_of_what_is_the_same_are_refused(name, tmp_path):
    """A megabyte of them would otherwise stand for hundreds of gigabytes."""
    program, message = FILES[name]
    data = pte_of(program, bytes(1000))
    with pytest.raises(ValueError, match=message):
        read_pte(data)
    (tmp_path / "model.pte").write_bytes(data)
    with pytest.raises(penstock.PayloadError, match=rf"model.pte is no .pte: .*{message}"):
        read(tmp_path / "model.pte")


def test_a_region_that_is_there_twice_is_refused_before_it_is_read(tmp_path):
    named = {PAYLOAD + sha256(BYTES).hexdigest(): BYTES}
    one = Delegate("forward", "PenstockBackend", b"the same")
    for delegates, message in (
        ([one], "a delegate of 'forward' is damaged"),
        ([one, one], "the same region of penstock twice"),
    ):
        (tmp_path / "model.pte").write_bytes(write_pte(named, delegates))
        with pytest.raises(penstock.PayloadError, match=message):
            read(tmp_path / "model.pte")


def test_no_more_of_a_data_file_is_read_than_a_list_takes(monkeypatch):
    class Watched(io.BytesIO):
        largest = 0

        def read(self, size=-1):
            found = super().read(size)
            self.largest = max(self.largest, len(found))
            return found

    monkeypatch.setattr(files, "_LARGEST_HEAD", 500)
    for size, refused in ((453, True), (452, False)):
        file = Watched(struct.pack("<I4s4s4xQQQ", 48, b"FT01", b"FH01", 48, size, 600) + bytes(1000))
        if refused:
            with pytest.raises(ValueError, match="its head has 501 bytes, expected 500"):
                read_ptd(file)
        else:
            assert read_ptd(file) == {}
        assert file.largest == (48 if refused else 500)
