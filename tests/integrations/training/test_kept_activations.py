"""What forwards keep for their backwards leaves memory for a file where it has no room."""

import errno
import gc
import logging
import os

import pytest
import torch

from penstock import LoadOptions
from penstock.integrations import apply
from penstock.runtime.files.direct_file import SpillFile
from penstock.schedule.facts.errors import BudgetError, SourceError
from penstock.schedule.facts.sizes import format_size
from tests.hunt import nightly_but, sampled
from tests.integrations.training import test_loops
from tests.integrations.training.adapted import adapted, batch, checkpointed, equal, gradients, steps, trained

LONG = batch(130)
BATCHES = [LONG, batch(100, padded=True, seed=1), batch(16), batch(130, seed=2)] * 2


@pytest.fixture(autouse=True)
def plans_of_the_cap(plans, half_streams):
    plans["now"] = None


def streamed(memory, cache, **kind):
    """A model of four layers that is trained in some memory, and what keeps its activations."""
    model = adapted(**{"layers": 4} | kind)
    applied = apply(
        model, memory, train=True, cache=cache, options=LoadOptions(arena="contiguous", poison=True)
    )
    (component,) = applied.components.values()
    return model, component.activations


def files_without_names(folder):
    """The blocks of open files in a folder that have no names."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            name, status = os.readlink(f"/proc/self/fd/{fd}"), os.stat(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith(str(folder)) and not status.st_nlink:
            found.append(status.st_blocks)
    return found


CASES = [(kind, how) for kind in ("sdpa", "eager") for how in (None, "reentrant", "not reentrant")]
LEAST = {"sdpa": "1400KB", "eager": "2600KB"}


@pytest.mark.random
@pytest.mark.parametrize(("attention", "how"), sampled(CASES, 4))
def test_bits_are_those_of_the_model_in_memory_and_each_byte_is_moved_once(attention, how, cache):
    expected = steps(checkpointed(adapted(attention=attention, layers=4), how), BATCHES)
    written = []
    for memory in ("20MB", "3MB", LEAST[attention]):
        model, activations = streamed(memory, cache, attention=attention)
        assert equal(steps(checkpointed(model, how), BATCHES), expected)
        assert activations.bytes_read == activations.bytes_written
        assert activations.nbytes == 0
        written.append(activations.bytes_written)
    assert written[0] == 0
    assert written == sorted(written)
    assert how is not None or written[0] < written[1] < written[2]


def test_a_backward_reads_within_the_room(cache, monkeypatch):
    model, activations = streamed("3MB", cache)
    steps(model, [LONG] * 3)
    kept, read = [], SpillFile.read_into

    def note(*given):
        kept.append(activations.nbytes)
        return read(*given)

    monkeypatch.setattr(SpillFile, "read_into", note)
    model(**LONG).loss.backward()
    assert len(kept) > 4
    assert max(kept) < 3_000_000
    assert not files_without_names(cache)


SAMPLE = (test_loops.between, test_loops.accumulated, test_loops.after_errors)


@pytest.mark.parametrize("loop", nightly_but(SAMPLE, test_loops.LOOPS))
def test_a_loop_computes_what_it_does_in_memory(loop, cache, monkeypatch):
    monkeypatch.setattr(test_loops, "GIVEN", batch(100))
    reference, (model, activations) = adapted(layers=4), streamed("1800KB", cache)
    for _ in range(2):
        assert equal(loop(model), loop(reference))
    assert activations.bytes_written


def test_a_graph_that_is_kept_is_read_again(cache):
    reference, (model, activations) = adapted(layers=4), streamed("2MB", cache)
    for one in (model, reference):
        gradients(one, LONG)
        one.zero_grad()
        torch.manual_seed(4)
        loss = one(**LONG).loss
        for _ in range(3):
            loss.backward(retain_graph=True)
    assert equal(*([value.grad for value in trained(one).values()] for one in (model, reference)))
    first, again = activations.left, activations.bytes_read - activations.bytes_written
    assert again == 2 * first > 0
    del loss
    assert not files_without_names(cache)


def test_many_forwards_run_before_their_backward(cache):
    model, activations = streamed("2MB", cache, dropout=0.0, layers=1)
    reference = adapted(dropout=0.0, layers=1)
    small = batch(40)
    for one in (model, reference):
        one.zero_grad()
        sum(one(**small).loss for _ in range(20)).backward()
    assert equal(*([value.grad for value in trained(one).values()] for one in (model, reference)))
    assert activations.bytes_read == activations.bytes_written > 0


def test_the_blocks_of_a_file_are_given_back_with_the_graph(cache):
    model, activations = streamed("1800KB", cache)
    gc.collect()
    for end in ("dropped", "failed", "derived"):
        loss = model(**LONG).loss
        assert sum(files_without_names(cache)) * 512 >= activations.left > 0
        if end == "failed":
            hook = next(iter(trained(model).values())).register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()
        elif end == "derived":
            loss.backward()
            assert not files_without_names(cache)
        del loss
        model.zero_grad()
        with torch.no_grad():
            model(**batch(16))
        assert not files_without_names(cache)
        assert activations.nbytes == 0


def test_a_tensor_that_is_written_after_it_was_saved_is_refused_as_by_torch(cache):
    class Written(torch.nn.Module):
        def forward(self, x):
            y = x.exp()
            z = y.sin()
            y.mul_(2)
            return z

    model, activations = streamed("1800KB", cache)
    act = model.get_base_model().model.layers[0].mlp
    act.act_fn = Written()
    loss = model(**LONG).loss
    assert activations.left
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("when", ["at once", "later", "read"])
def test_a_disk_that_is_full_or_broken_is_said_in_a_sentence(when, cache, monkeypatch):
    model, activations = streamed("1800KB", cache)
    expected = gradients(adapted(layers=4), LONG)
    write, read, done = os.pwritev, os.preadv, []

    def refuse(fd, parts, offset):
        done.append(fd)
        if when == "at once" or len(done) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, parts, offset)

    def fail(fd, parts, offset):
        if os.stat(fd).st_nlink:
            return read(fd, parts, offset)
        raise OSError(errno.EIO, "Input/output error")

    for _ in range(2):
        with monkeypatch.context() as patch:
            if when == "read":
                loss = model(**LONG).loss
                patch.setattr(os, "preadv", fail)
                with pytest.raises(SourceError, match=r"could not be read back .*cache="):
                    loss.backward()
                del loss
            else:
                patch.setattr(os, "pwritev", refuse)
                with pytest.raises(SourceError, match=r"No space left on device.*free some room.*cache="):
                    model(**LONG)
        assert equal(gradients(model, LONG), expected)
    assert activations.nbytes == 0


def test_what_has_left_is_said(cache, caplog):
    caplog.set_level(logging.INFO, "penstock")
    model, activations = streamed("1800KB", cache)
    steps(model, [LONG] * 5)
    said = [record.message for record in caplog.records if "step 4:" in record.message]
    assert len(said) == 1
    assert f"{format_size(activations.left)} of activations written to a file and read again" in said[0]


def test_where_the_rest_does_not_fit_the_numbers_that_are_said_lead_to_one_that_does(cache):
    memory = 800_000
    for _ in range(8):
        model, activations = streamed(memory, cache)
        try:
            losses = steps(model, [LONG] * 2)
            break
        except BudgetError as error:
            said, memory = str(error), error.floor_bytes
    assert "at once; give at least" in said
    assert equal(losses, steps(adapted(layers=4), [LONG] * 2))
    assert activations.bytes_written
