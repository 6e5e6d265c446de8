"""Commands of benchmarks, and the processes of their ways, in the process of a test."""

import contextlib

import typer
from typer.testing import CliRunner


def invoke(main, *arguments):
    """Run the function of a command as from a shell."""
    application = typer.Typer()
    application.command()(main)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


class Here:
    """What `benchmarks.ways.Way` is of a process."""

    bare, failure, peak_anonymous = 0, "", 0

    def __init__(self, step):
        self.steps = []
        self._step = step

    def step(self, how):
        self.steps.append(self._step(how))


def started_here(stepping, limits):
    """What `benchmarks.ways.started` is, without processes; it appends the limits that it is given."""

    @contextlib.contextmanager
    def started(_, jobs, given, environment=None):
        limits.append(given)
        yield {job.way: Here(stepping(job)) for job in jobs}

    return started
