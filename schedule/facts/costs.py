"""What steps cost where nobody has measured them: a roofline over their work."""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.facts.model import Hardware, Trace, Work


def roofline_ns(work: Work, hardware: Hardware) -> int:
    """Nanoseconds of some work: the longer of computing and of moving its bytes.

    (Williams, Waterman and Patterson, Roofline, Communications of the ACM 52(4), 2009.)
    """
    seconds = max(work.flops / hardware.flops_per_s, work.nbytes / hardware.memory_bytes_per_s)
    return round(seconds * 1e9)


def with_times(trace: Trace, hardware: Hardware) -> Trace:
    """The trace with times modelled from its work for `hardware`; the gap is kept."""
    steps = tuple(
        replace(
            step,
            lead_ns=roofline_ns(step.lead_work, hardware),
            read_ns=roofline_ns(step.read_work, hardware),
        )
        for step in trace.steps
    )
    return replace(trace, steps=steps, tail_ns=roofline_ns(trace.tail_work, hardware), times="modelled")
