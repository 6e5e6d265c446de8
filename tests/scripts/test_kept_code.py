"""What g++ made is given back for the same source, words and machine, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kept_code import Compile, keeping

SOURCE = "int one() { return 1; }\n"
COMMAND = "g++ a.cpp -O1 -c -o a.o"


@pytest.fixture
def ran() -> list[str]:
    """The commands that were really run."""
    return []


@pytest.fixture
def run(tmp_path: Path, ran: list[str]) -> Compile:
    def compile_as_ever(command: str, folder: str) -> None:
        ran.append(command)
        Path(folder, command.rpartition(" ")[2]).write_text(f"object {len(ran)}")

    return keeping(compile_as_ever, tmp_path / "kept")


def made(run: Compile, folder: Path, command: str = COMMAND, source: str = SOURCE) -> str:
    """What a command makes of a source in a new folder."""
    folder.mkdir()
    (folder / "a.cpp").write_text(source)
    run(command, str(folder))
    return (folder / command.rpartition(" ")[2]).read_text()


def test_what_was_made_is_made_once(run: Compile, ran: list[str], tmp_path: Path) -> None:
    assert made(run, tmp_path / "1") == made(run, tmp_path / "2") == "object 1"
    assert made(run, tmp_path / "3", source=SOURCE + "// g++ a.cpp\n") == "object 1"  # how it was compiled
    assert made(run, tmp_path / "4", command="g++ a.cpp -O1 -c -o b.o") == "object 1"
    assert ran == [COMMAND]


@pytest.mark.parametrize(
    ("command", "source"),
    [
        (COMMAND, SOURCE.replace("1", "2")),
        ("g++ a.cpp -O2 -c -o a.o", SOURCE),
        ("gcc a.cpp -O1 -c -o a.o", SOURCE),
    ],
)
def test_another_source_flag_or_compiler_makes_another(
    run: Compile, ran: list[str], tmp_path: Path, command: str, source: str
) -> None:
    assert made(run, tmp_path / "1") == "object 1"
    assert made(run, tmp_path / "2", command, source) == "object 2"
    assert ran == [COMMAND, command]


def test_what_links_always_runs(run: Compile, ran: list[str], tmp_path: Path) -> None:
    link = "g++ a.cpp -shared -o a.so"
    assert [made(run, tmp_path / "1", link), made(run, tmp_path / "2", link)] == ["object 1", "object 2"]
    assert ran == [link, link]
