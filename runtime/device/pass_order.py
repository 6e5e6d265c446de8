"""Orders the passes of a module on a device: each behind the one before, and closing behind all of them.

A caller may use another stream for each pass. What a pass finds in memory was brought and written for the
kernels of the passes before, so its own run behind them. What a caller captures as a graph runs when he
replays it, which nobody here sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.runtime.device.protocol import Device, Event, lost


class PassOrder:
    """The end of the last pass on `device`. `captured` says that a pass may be replayed by its caller."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ended: Event | None = None
        self._known = True  # false while a pass runs, and where an interrupt came before its end was recorded
        self.captured = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold while the kernels of one pass are called, on the stream that is current."""
        device = self._device
        if device.capturing:  # in which nothing from outside can be waited for
            self.captured = True
            yield
            return
        try:
            if not self._known:
                device.finish()
            elif self._ended is not None:
                device.wait(device.current_stream(), self._ended)
        except Exception as error:  # nothing of this pass has run: it is the device itself
            raise lost(device, error) from error
        self._known = False
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the device may be lost, and the error says so
                self._record()
            raise
        self._record()

    def close(self) -> None:
        """Wait for the kernels of all passes, also if they fail, and of replays. It may be called again."""
        with suppress(Exception):
            if self.captured or not self._known:
                self._device.finish()
            elif self._ended is not None:
                self._device.synchronize(self._ended)

    def _record(self) -> None:
        self._ended = self._device.record(self._device.current_stream())
        self._known = True
