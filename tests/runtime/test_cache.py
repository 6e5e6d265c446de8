"""The cache folder: what is listed, what is in use, and what goes by age, by size and with what it reads."""

import fcntl
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.runtime.cache import LIMIT, Cache, list_entries, prune
from penstock.runtime.system.atomic import remove_folder, write_artifact
from penstock.schedule.facts.errors import BudgetError, SourceError

DAY = 86_400
NOW = 1_700_000_000


def name_of(number):
    return f"{number:032x}"


def write_folder(path, nbytes):
    def build(folder):
        (folder / "data").write_bytes(bytes(nbytes))

    write_artifact(path, force=False, build=build)


def add_weights(cache, number, nbytes=1000, *, days=0):
    """Weights that nobody uses, `days` old."""
    path = cache.weights / name_of(number)
    cache.keep(path, f"model {number}", lambda: write_folder(path, nbytes)).close()
    return aged(path, days)


def aged(path, days):
    os.utime(path / "entry.json", (NOW - days * DAY,) * 2)
    return path


def paths(entries):
    return {one.path for one in entries}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path)


def test_entries_are_listed_with_kind_owner_size_and_age(cache):
    new, old = add_weights(cache, 1, 3000), add_weights(cache, 2, 500, days=9)
    program = cache.folder / "programs" / f"{name_of(3)}.penstock"  # of an earlier version
    program.mkdir(parents=True)
    (program / "entry.json").write_text('{"made_for": "model 3"}')
    aged(program, 2)
    plan, call, rates = (
        cache.folder / name
        for name in (f"plans/{name_of(4)}.json", f"calls/{name_of(5)}.zip", "hardware.json")
    )
    for file, days in ((plan, 1), (call, 3), (rates, 1)):
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        os.utime(file, (NOW - days * DAY,) * 2)
    found = list_entries(cache.folder)
    assert [one.path for one in found] == [old, call, program, rates, plan, new]
    assert [one.kind for one in found] == ["weights", "call", "program", "rates", "plan", "weights"]
    assert [one.made_for for one in found] == ["model 2", "", "model 3", "", "", "model 1"]
    record = (old / "entry.json").stat().st_size
    assert [one.nbytes for one in found if one.kind == "weights"] == [500 + record, 3000 + record]
    assert found[0].used == NOW - 9 * DAY
    assert not any(one.in_use for one in found)
    assert paths(prune(cache.folder, before=NOW - 1.5 * DAY).removed) == {old, call, program}


def test_what_penstock_did_not_name_is_neither_listed_nor_removed(cache):
    mine = cache.weights / "thesis"
    mine.mkdir(parents=True)
    (cache.folder / "notes.json").touch()
    assert prune(cache.folder, before=math.inf).removed == ()
    assert mine.is_dir()
    assert (cache.folder / "notes.json").is_file()


def test_what_is_in_use_stays_and_goes_when_it_is_let_go(cache):
    path = add_weights(cache, 1, days=1)
    held = [cache.keep(path, "model", lambda: None) for _ in range(2)]
    (entry,) = list_entries(cache.folder)
    assert entry.in_use
    assert entry.used > NOW  # to use it is what sets its time
    for one in held:
        assert paths(prune(cache.folder, before=math.inf).in_use) == {path}
        assert path.is_dir()
        one.close()
    assert not entry.in_use
    assert paths(prune(cache.folder, before=math.inf).removed) == {path}
    assert not list(cache.weights.iterdir())


def test_what_nobody_has_any_more_is_not_in_use(cache):
    path = add_weights(cache, 1)
    held = cache.keep(path, "model", lambda: None)
    (entry,) = list_entries(cache.folder)
    assert entry.in_use
    del held
    assert not entry.in_use


def test_a_killed_process_uses_nothing(cache):
    path = add_weights(cache, 1)
    held = (
        "import sys; from pathlib import Path; from penstock.runtime.cache import Cache\n"
        "path = Path(sys.argv[1]); held = Cache(path.parents[1]).keep(path, 'other', lambda: None)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", held, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    try:
        assert child.stdout.readline() == b"held\n"
        assert prune(cache.folder, before=math.inf).removed == ()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert paths(prune(cache.folder, before=math.inf).removed) == {path}


def test_an_entry_is_let_go_whatever_the_system_says(cache, monkeypatch):
    path, close = add_weights(cache, 1), os.close
    held = cache.keep(path, "model", lambda: pytest.fail("it is there"))

    def refuse(fd):
        close(fd)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", refuse)
        held.close()
    assert not list_entries(cache.folder)[0].in_use


def test_by_size_what_was_not_used_for_the_longest_time_goes_first(cache):
    added = [add_weights(cache, number, 1000, days=number) for number in range(5)]
    (cache.folder / "hardware.json").write_text("{}")
    os.utime(cache.folder / "hardware.json", (NOW - 99 * DAY,) * 2)
    done = prune(cache.folder, most=3500)
    assert paths(done.removed) == set(added[3:])
    assert done.left_bytes <= 3500
    assert paths(prune(cache.folder, most=0).removed) == set(added[:3])
    assert (cache.folder / "hardware.json").is_file()  # of no size, and it takes time to measure


def test_a_dry_run_says_the_same_and_changes_nothing(cache):
    path = add_weights(cache, 1)
    (path / "entry.json").unlink()
    leftover = cache.weights / f".{name_of(2)}.tmp-0a1b2c3d"
    leftover.mkdir()
    done = prune(cache.folder, before=math.inf, dry_run=True)
    assert [one.name for one in path.iterdir()] == ["data"]
    assert leftover.is_dir()
    assert done == prune(cache.folder, before=math.inf)
    assert not list(cache.weights.iterdir())


def test_what_killed_writers_left_goes_and_what_is_being_written_stays(cache):
    leftover = cache.weights / f".{name_of(1)}.tmp-00000000"
    leftover.mkdir(parents=True)
    (leftover / "data").write_bytes(bytes(700))
    rates = (
        cache.folder / ".hardware.json.tmp-00000000"
    )  # beside the entry of the only kind that has no folder
    rates.write_bytes(bytes(70))
    found = []

    def build(folder):
        (folder / "data").touch()
        found.extend([list_entries(cache.folder), prune(cache.folder).removed, folder.is_dir()])

    write_artifact(cache.weights / name_of(2), force=False, build=build)
    listed, removed, kept = found
    assert {one.kind for one in listed} == {"leftover"}
    assert {one.path: one.nbytes for one in removed} == {leftover: 700, rates: 70}
    assert kept


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(cache, monkeypatch):
    path = add_weights(cache, 1)

    def refuse(folder):
        raise OSError(5, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        for ask in (list_entries, prune):
            with pytest.raises(SourceError, match=r"weights cannot be read \(Input/output error\)"):
                ask(cache.folder)
    assert paths(list_entries(cache.folder)) == {path}
    assert list_entries(cache.folder / "none") == ()


def test_the_limit_makes_room_before_writing_and_never_takes_what_is_in_use(cache, caplog):
    old, used, new = (add_weights(cache, number, 1000, days=9 - number) for number in range(3))
    limited = Cache(cache.folder, limit=3500)
    held = limited.keep(used, "model", lambda: None)
    path, seen = cache.weights / name_of(9), []

    def write():
        seen.extend(one.path for one in list_entries(cache.folder))
        write_folder(path, 1200)

    with caplog.at_level(logging.WARNING, "penstock"):
        more = limited.keep(path, "model", write, nbytes=1200)
        assert seen == [new, used]
        assert not caplog.messages
        for number in (10, 11):  # what is written last is needed, and so is all else
            other = cache.weights / name_of(number)
            limited.keep(other, "model", lambda other=other: write_folder(other, 2000), nbytes=2000).close()
    assert not old.exists()
    assert used.is_dir()
    assert path.is_dir()
    (said,) = caplog.messages
    assert "PENSTOCK_CACHE_LIMIT is 3.5 kB (3.42 KiB): what is left there is in use" in said
    held.close()
    more.close()


def test_the_limit_is_that_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(LIMIT, raising=False)
    assert Cache.at(tmp_path).limit is None
    monkeypatch.setenv(LIMIT, "20GB")
    assert Cache.at(tmp_path).limit == 20 * 10**9
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(BudgetError, match="PENSTOCK_CACHE_LIMIT 'much' is not a size"):
        Cache.at(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(LIMIT, "")
    assert Cache.at(None).folder == tmp_path / "penstock"


def test_what_cannot_be_written_is_said(cache):
    path = cache.weights / name_of(1)

    def fail():
        raise SourceError("the disk is full")

    with pytest.raises(SourceError, match="the disk is full"):
        cache.keep(path, "model", fail)
    (cache.folder / "taken").touch()
    with pytest.raises(SourceError, match=r"taken.* cannot be made"):
        Cache(cache.folder / "taken").keep(cache.folder / "taken" / "weights" / "a", "model", fail)


def test_who_waits_for_a_removal_finds_the_entry_gone_and_writes_it_again(cache):
    path, found = add_weights(cache, 1), []
    with (path / "entry.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)  # as a pruner has it
        thread = threading.Thread(
            target=lambda: found.append(cache.keep(path, "again", lambda: write_folder(path, 10)))
        )
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        remove_folder(path)
    thread.join()
    assert (path / "data").stat().st_size == 10
    (entry,) = list_entries(cache.folder)
    assert (entry.made_for, entry.in_use) == ("again", True)


def test_users_and_a_pruner_at_once(cache):
    """Whoever holds an entry finds it whole, however often others remove it."""
    path, enough, failed = cache.weights / name_of(1), threading.Event(), []

    def use():
        while not enough.is_set() and not failed:
            try:
                held = cache.keep(path, "model", lambda: write_folder(path, 10))
                assert (path / "data").stat().st_size == 10
                held.close()
                enough.wait(0.001)  # or some other always has it
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    removed = 0
    while removed < 10 and not failed:
        removed += len(prune(cache.folder, before=math.inf).removed)
    enough.set()
    for thread in threads:
        thread.join()
    assert not failed
