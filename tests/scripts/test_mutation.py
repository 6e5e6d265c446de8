"""`make mutants` itself: which changes it makes, that it takes them back, and how it runs them."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.mutants.changes import mutants_of
from tests.mutants.run import EQUIVALENT, ROOMS, Compiled, Instrumented, forked, mutants_of_room


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


SOURCE = '''
LIMIT = 3

class Box:
    def take(self, given, *, whole=True):
        """Says what it takes."""
        if not given or len(given) > LIMIT:
            raise ValueError(f"{len(given) + 1} are too many")
        self.most = max(self.most, len(given) - 1)
        given.sort()
        assert given == 1
        return [one for one in given if one]
'''

EXPECTED = {
    ("module", "LIMIT = 3", "LIMIT = 4"),
    ("Box.take", "def take(self, given, *, whole=True):", "def take(self, given, *, whole=False):"),
    ("Box.take", "if not given or len(given) > LIMIT:", "if not given and len(given) > LIMIT:"),
    ("Box.take", "if not given or len(given) > LIMIT:", "if not (not given or len(given) > LIMIT):"),
    ("Box.take", "if not given or len(given) > LIMIT:", "if given or len(given) > LIMIT:"),
    ("Box.take", "if not given or len(given) > LIMIT:", "if not given or len(given) >= LIMIT:"),
    ("Box.take", "raise ValueError(f'{len(given) + 1} are too many')", "pass"),
    ("Box.take", "self.most = max(self.most, len(given) - 1)", "pass"),
    ("Box.take", "self.most = max(self.most, len(given) - 1)", "self.most = min(self.most, len(given) - 1)"),
    ("Box.take", "self.most = max(self.most, len(given) - 1)", "self.most = max(self.most, len(given) + 1)"),
    ("Box.take", "self.most = max(self.most, len(given) - 1)", "self.most = max(self.most, len(given) - 2)"),
    ("Box.take", "given.sort()", "pass"),
    ("Box.take", "return [one for one in given if one]", "return [one for one in given if True]"),
}


def test_every_change_is_made_once_and_taken_back():
    tree = ast.parse(SOURCE)
    before = ast.unparse(tree)
    found = list(mutants_of("box.py", tree))
    assert [(one.scope, one.before, one.after) for one in found if one.after == one.before] == []
    assert len(found) == len(EXPECTED)
    assert {(one.scope, one.before, one.after) for one in found} == EXPECTED
    changed = set()
    for one in found:
        one.put(True)
        compile(tree, "box.py", "exec")
        changed.add(ast.unparse(tree))
        one.put(False)
        assert ast.unparse(tree) == before
    assert len(changed) == len(EXPECTED)


def test_a_module_is_imported_as_it_was_changed_and_says_what_it_ran():
    path = "schedule/facts/sizes.py"
    tree = Instrumented(path).visit(ast.parse(Path(path).read_text()))

    def run():
        sys.modules.pop("penstock.schedule.facts.sizes", None)
        sys.meta_path.insert(0, Compiled({path: tree}))
        reached = set()
        sys.modules["builtins"].__reached__ = reached.add  # type: ignore[attr-defined]
        sizes = importlib.import_module("penstock.schedule.facts.sizes")
        return sizes.format_size(2048), sorted(reached)

    said = forked(run, 60)
    assert said is not None
    assert said.startswith('["2.00 KiB", ["schedule/facts/sizes.py:'), said


def test_what_is_equivalent_is_a_mutant_of_today():
    listed = [match.groups() for match in EQUIVALENT.finditer(Path("docs/notes/tests.md").read_text())]
    every = set()
    for room in ROOMS:
        every |= {(one.path, one.scope, one.before, one.after) for one in mutants_of_room(room)[1]}
    assert listed
    assert [one for one in listed if one not in every] == []
