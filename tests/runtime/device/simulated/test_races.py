"""Vector clocks over byte ranges, on histories whose races are known."""

import random

import pytest

from penstock.runtime.device.simulated import RaceDetector, RaceError


def touch(detector, thread, start, stop, *, writes):
    detector.tick(thread)
    detector.access("memory", start, stop, thread, f"{start} to {stop}", writes=writes)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_unordered_accesses_of_one_byte_race_if_one_writes(first, second):
    detector = RaceDetector()
    touch(detector, "a", 0, 10, writes=first)
    with pytest.raises(
        RaceError, match=r"bytes 9 to 10 of memory: nothing orders 0 to 10, which .* on a, and"
    ):
        touch(detector, "b", 9, 20, writes=second)


def test_reads_and_neighbours_do_not_race():
    detector = RaceDetector()
    for thread in "ab":
        touch(detector, thread, 0, 10, writes=False)
    touch(detector, "a", 10, 20, writes=True)
    touch(detector, "b", 20, 30, writes=True)


def test_what_is_known_is_ordered_and_only_that():
    detector = RaceDetector()
    touch(detector, "a", 0, 10, writes=True)
    known = detector.clock_of("a")
    touch(detector, "a", 10, 20, writes=True)
    detector.join("b", known)
    touch(detector, "b", 0, 10, writes=True)
    with pytest.raises(RaceError):
        touch(detector, "b", 10, 20, writes=False)


def test_order_goes_through_a_third():
    detector = RaceDetector()
    touch(detector, "a", 0, 10, writes=True)
    detector.join("b", detector.clock_of("a"))
    detector.tick("b")
    detector.join("c", detector.clock_of("b"))
    touch(detector, "c", 0, 10, writes=True)


def test_random_histories_agree_with_reachability():
    """Against the graph of all operations, in which an edge goes from each to what is ordered after it."""
    chance = random.Random(5)
    raced = 0
    for _ in range(300):
        detector, after, accesses = RaceDetector(), {}, []
        newest = {}
        expected = found = False
        for number in range(8):
            thread = chance.choice("abc")
            before = {newest[thread]} if thread in newest else set()
            if chance.random() < 0.5 and newest:
                other = chance.choice(list(newest))
                detector.join(thread, detector.clock_of(other))
                before.add(newest[other])
            after[number] = set().union(before, *(after[one] for one in before))
            newest[thread] = number
            start = chance.randrange(20)
            access = (start, start + chance.randrange(1, 6), chance.random() < 0.4)
            expected = any(
                low < access[1] and access[0] < high and (wrote or access[2]) and one not in after[number]
                for one, (low, high, wrote) in accesses
            )
            try:
                touch(detector, thread, access[0], access[1], writes=access[2])
            except RaceError:
                found = True
            assert found == expected
            if expected:
                raced += 1
                break
            accesses.append((number, access))
    assert 50 < raced < 300
