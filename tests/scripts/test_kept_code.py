"""What g++ made is given back for the same source, words and machine, and for nothing else."""

from pathlib import Path

import pytest

from tests.kept_code import keeping

SOURCE = "int one() { return 1; }\n"
COMMAND = "g++ a.cpp -O1 -c -o a.o"


@pytest.fixture
def ran():
    """The commands that were really run."""
    return []


@pytest.fixture
def run(tmp_path, ran):
    def compile_as_ever(command, folder):
        ran.append(command)
        Path(folder, command.rpartition(" ")[2]).write_text(f"object {len(ran)}")

    return keeping(compile_as_ever, tmp_path / "kept")


def made(run, folder, command=COMMAND, source=SOURCE):
    """What a command makes of a source in a new folder."""
    folder.mkdir()
    (folder / "a.cpp").write_text(source)
    run(command, str(folder))
    return (folder / command.rpartition(" ")[2]).read_text()


def test_what_was_made_is_made_once(run, ran, tmp_path):
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
def test_another_source_flag_or_compiler_makes_another(run, ran, tmp_path, command, source):
    assert made(run, tmp_path / "1") == "object 1"
    assert made(run, tmp_path / "2", command, source) == "object 2"
    assert ran == [COMMAND, command]
