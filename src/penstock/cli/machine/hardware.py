"""`penstock hardware`: the presets, and the measured figures of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console
from penstock.cli.terminal.options import Json, check_hardware, fail, offer
from penstock.schedule.facts.hardware import PRESETS, find_hardware
from penstock.schedule.facts.model import Hardware

if TYPE_CHECKING:
    from penstock.runtime.machine.figures import Measurement

EXAMPLES = (
    "penstock hardware",
    "penstock hardware h200",
    "penstock hardware rtx4090,memory=20GB,link=12GB/s --json",
    "penstock hardware --measure",
)


_PRESET_LEGEND = (
    "weights: the rate at which they reach the memory in which they are used: a GPU's from its host, a CPU's "
    "from its disk. disk: that of a GPU's host. memory GB: how much there is."
)
_MEASURED_LEGEND = (
    "median: of several trials. spread: how far apart they are. waited: the share of the time for which "
    "threads had to wait for a processor."
)
_DOUBTFUL = "Doubtful, and so used for an hour at most; measure again (--measure) when the machine is quiet:"


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, one with other figures, a .json file, or auto: this machine.",
            callback=lambda name: name and check_hardware(name),
            autocompletion=offer("auto", *PRESETS),
            show_default=False,
        ),
    ] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    json: Json = False,
) -> None:
    """List the hardware that plans can be made for, and the speeds that were measured."""
    if name not in (None, "auto"):
        if measure:
            fail(f"--measure is about this machine, and {name} is another: leave out one of them")
        _show_preset(find_hardware(name), json=json)
        return
    if measure:
        with console.spinner("measuring"):
            from penstock.runtime.machine.calibrate import measure_again

            measure_again()
    from penstock.runtime.machine.figures import measurements

    figures, presets = measurements(), [] if name else list(PRESETS.values())
    if json:
        measured = [_facts(figure) for figure in figures]
        console.print_json({"presets": [asdict(preset) for preset in presets], "measured": measured})
        return
    if presets:
        console.print_table("Presets", *_presets(presets))
        console.print_sentences([_PRESET_LEGEND])
    _print_measured(figures)
    if measure:
        console.print_text("How fast weights arrive is measured again when the next plan needs it.")


def _print_measured(figures: Sequence[Measurement]) -> None:
    """Print a table of each machine's figures, the meaning of its columns, and reasons for doubts."""
    newest = {
        (figure.subject.machine, *_subject(figure)): figure
        for figure in sorted(figures, key=lambda figure: figure.taken_at)
    }
    figures = sorted(newest.values(), key=_subject)
    for machine in dict.fromkeys(figure.subject.machine for figure in figures):
        threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
        title = f"Measured on {machine.processor}, {threads}, torch {machine.torch}"
        console.print_table(
            title, *_measured([figure for figure in figures if figure.subject.machine == machine])
        )
    if not figures:
        console.print_text("Nothing has been measured yet: plans do it, and --measure.")
        return
    console.print_sentences([_MEASURED_LEGEND])
    used = [figure for figure in figures if figure.is_fresh(time.time())]
    if doubts := [(figure, ", ".join(figure.doubts())) for figure in used if any(figure.doubts())]:
        console.print_sentences([_DOUBTFUL])
        for figure, why in doubts:
            of_file = f" of {figure.subject.what}" if figure.subject.where else ""
            console.print_sentences([f"{figure.subject.title}{of_file} {why}"], indent="  ")


def _subject(figure: Measurement) -> tuple[str, str, str]:
    """What a reader sees of the subject of a figure: the file or the like, where it is, and the quantity."""
    of_file = figure.subject.where != ""
    return (figure.subject.what if of_file else "", figure.subject.where, figure.subject.title)


def _show_preset(preset: Hardware, *, json: bool) -> None:
    if json:
        console.print_json(asdict(preset))
        return
    latency = f"{preset.link_latency_ns / 1e3:g} us a copy"
    facts = [
        ("products", f"{preset.flops_per_s / 1e12:g} TFLOP/s"),
        ("memory", f"{_gb(preset.memory_bytes_per_s)} GB/s"),
        ("weights arrive at", f"{_gb(preset.link_bytes_per_s)} GB/s, {latency}"),
    ]
    rate, ways = preset.write_bytes_per_s, "beside" if preset.duplex else "in turn with"
    written = f"{_gb(rate)} GB/s" if rate else "the same rate, which is assumed"
    facts.append(("kept values leave at", f"{written}, {ways} what arrives"))
    if preset.disk_bytes_per_s is not None:
        facts.append(("from the disk at", f"{_gb(preset.disk_bytes_per_s)} GB/s"))
    if preset.host_step_ns:
        facts.append(("launching a step takes", f"{preset.host_step_ns / 1e3:g} us of the calling thread"))
    if preset.memory_nbytes is not None:
        facts.append(("memory of the device", f"{_gb(preset.memory_nbytes)} GB"))
    console.print_facts(preset.name, [*facts, ("where from", preset.note)])


def _presets(presets: Sequence[Hardware]) -> tuple[tuple[str, ...], list[list[str]]]:
    columns = ("name", "TFLOP/s", "memory GB/s", "weights GB/s", "disk GB/s", "memory GB")
    rows = [
        [
            preset.name,
            f"{preset.flops_per_s / 1e12:g}",
            _gb(preset.memory_bytes_per_s),
            _gb(preset.link_bytes_per_s),
            _gb(preset.disk_bytes_per_s),
            _gb(preset.memory_nbytes),
        ]
        for preset in presets
    ]
    return columns, rows


def _gb(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / 1e9:g}"


def _measured(figures: Sequence[Measurement]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows, above = [], None
    for figure in figures:
        place = (figure.subject.what, figure.subject.where)
        of = [] if figure.subject.where == "" or place == above else list(place)
        above = place
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(figure.taken_at))
        believed = "" if figure.is_fresh(time.time()) else "expired"
        doubt = "doubtful" if any(figure.doubts()) else ""
        rows.append(
            [
                "\n".join([figure.subject.title, *of]),
                figure.amount,
                f"{figure.spread:.0%}",
                f"{figure.waited:.0%}",
                "\n".join(filter(None, (taken, doubt, believed))),
            ]
        )
    return ("measured", "median", "spread", "waited", "taken"), rows


def _facts(figure: Measurement) -> dict[str, Any]:
    """A figure for JSON: its remembered fields, its unit, and whether it is doubtful or expired now."""
    opinion = {"title": figure.subject.title, "unit": figure.unit, "doubts": list(figure.doubts())}
    return asdict(figure) | opinion | {"fresh": figure.is_fresh(time.time())}
