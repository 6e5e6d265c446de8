"""`penstock hardware`: the presets, and the measured figures of this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import console
from penstock.cli.terminal.inputs import fail
from penstock.cli.terminal.options import Json, check_hardware, offer
from penstock.schedule.facts.hardware import PRESETS
from penstock.schedule.facts.model import Hardware

if TYPE_CHECKING:
    from penstock.runtime.measurements import Measurement

EXAMPLES = ("penstock hardware", "penstock hardware h200", "penstock hardware --measure")


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, or auto: this machine.",
            callback=lambda given: given and check_hardware(given),
            autocompletion=offer("auto", *PRESETS),
            show_default=False,
        ),
    ] = None,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    json: Json = False,
) -> None:
    """List the hardware that plans can be made for, and the measured speed of this machine."""
    if name in PRESETS:
        if measure:
            fail(f"--measure is about this machine, and {name} is a preset: leave out one of them")
        _show_preset(PRESETS[name], json=json)
        return
    with console.spinner("measuring" if measure else "importing"):
        from penstock.runtime.calibrate import machines_here, measure_again
        from penstock.runtime.measurements import measurements

        if measure:
            measure_again()
        here = machines_here()
        found = [one for one in measurements() if one.subject.machine in here]
    presets = [] if name else list(PRESETS.values())
    if json:
        measured = [_facts(one) for one in found]
        console.print_json({"presets": [asdict(one) for one in presets], "measured": measured})
        return
    if presets:
        console.print_table("Presets", *_presets(presets))
    if found:
        console.print_table(f"Measured on {here[0].processor}, {here[0].threads} threads", *_measured(found))
    else:
        console.print_text("Nothing has been measured on this machine yet: plans do it, and --measure.")
    if measure:
        console.print_text("How fast weights arrive is measured again when the next plan needs it.")


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
    if preset.disk_bytes_per_s is not None:
        facts.append(("from the disk at", f"{_gb(preset.disk_bytes_per_s)} GB/s"))
    if preset.memory_nbytes is not None:
        facts.append(("memory of the device", f"{_gb(preset.memory_nbytes)} GB"))
    console.print_facts(preset.name, [*facts, ("where from", preset.note)])


def _presets(presets: Sequence[Hardware]) -> tuple[tuple[str, ...], list[list[str]]]:
    columns = ("name", "TFLOP/s", "memory GB/s", "weights GB/s", "disk GB/s", "memory GB")
    rows = [
        [
            one.name,
            f"{one.flops_per_s / 1e12:g}",
            _gb(one.memory_bytes_per_s),
            _gb(one.link_bytes_per_s),
            _gb(one.disk_bytes_per_s),
            _gb(one.memory_nbytes),
        ]
        for one in presets
    ]
    return columns, rows


def _gb(amount: float | None) -> str:
    return "" if amount is None else f"{amount / 1e9:g}"


def _measured(found: Sequence[Measurement]) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = []
    for one in found:
        of = [] if one.subject.where == "" else [one.subject.what, one.subject.where]
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.taken_at))
        believed = "" if one.is_fresh(time.time()) else "expired"
        doubt = "doubtful" if any(one.doubts()) else ""
        rows.append(
            [
                "\n".join([one.subject.title, *of]),
                one.amount,
                f"{one.spread:.0%}",
                f"{one.waited:.0%}",
                "\n".join(filter(None, (taken, doubt, believed))),
            ]
        )
    return ("measured", "median", "spread", "waited", "taken"), rows


def _facts(one: Measurement) -> dict[str, Any]:
    """A figure for JSON: its remembered fields, its unit, and whether it is doubtful or expired now."""
    opinion = {"title": one.subject.title, "unit": one.unit, "doubts": list(one.doubts())}
    return asdict(one) | opinion | {"fresh": one.is_fresh(time.time())}
