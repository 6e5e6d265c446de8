"""What users may tell Inductor, what penstock tells it, and what came of it when it failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.passes.lowering.post_grad import GraphPass
from penstock.schedule.facts.errors import PassError, PenstockError

FIXED = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
}
_DEFEATS_STREAMING = {
    "aot_inductor.package_constants_in_so": "puts the weights into the shared object",
    "aot_inductor.use_runtime_constant_folding": "computes with weights once, before the program runs",
    "freezing": "folds weights into constants",
}


def own_passes(options: Mapping[str, Any]) -> tuple[GraphPass, ...]:
    """Returns what the user has Inductor run where the probes go in, from these options or torch's."""
    from torch._inductor import config

    given = options.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    return tuple(given) if isinstance(given, list | tuple) else (given,) if given else ()


def check_options(options: Mapping[str, Any]) -> None:
    """Raises PassError for options of Inductor's, or settings of torch's, that defeat streaming."""
    from torch._inductor import config

    for name in options:
        if not hasattr(_nested(config, name), name.rpartition(".")[2]):
            raise PassError(f"Inductor has no option {name!r}: see torch._inductor.list_options()")
    for name, what in _DEFEATS_STREAMING.items():
        default = False if name in FIXED else getattr(_nested(config, name), name.rpartition(".")[2], False)
        if options.get(name, default):
            raise PassError(f"the option {name!r} {what}, so that nothing is left to stream: turn it off")


def _nested(config: Any, name: str) -> Any:
    for part in name.split(".")[:-1]:
        config = getattr(config, part, None)
    return config


def raise_own(error: BaseException) -> None:
    """Raises the error of the tree that torch has wrapped into another, if there is one."""
    for cause in _causes(error):
        if isinstance(cause, PenstockError):
            raise cause from None


def _causes(error: BaseException) -> Sequence[BaseException]:
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in found:
            found.append(one)
            waiting += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
    return found
