"""The benchmark of depth refuses what cannot be measured."""

from typer.testing import CliRunner

from benchmarks import depth


def test_a_budget_within_which_nothing_streams_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = depth.typer.Typer()
    app.command()(depth.main)
    done = CliRunner().invoke(app, ["--size", "4MiB", "--budget", "100%", "--tokens", "1", "--rounds", "1"])
    assert done.exit_code == 2
    assert "nothing streams within 100% of 4MiB" in " ".join(done.output.split())
