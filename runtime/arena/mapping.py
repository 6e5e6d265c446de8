"""The arena that maps the weight files."""

from __future__ import annotations

import mmap
from bisect import bisect_right

from penstock.native.library import library
from penstock.runtime.arena.reading import PagedArena, Pages
from penstock.runtime.files.direct_file import AGAIN
from penstock.runtime.system.memory import MADV_POPULATE_READ, PAGE, advise
from penstock.schedule.facts.errors import PlanError, SourceError, StreamError


class MappedArena(PagedArena):
    """The weight files, one after another, of which only what has been filled is in the page tables.

    The layout must place each file as a whole: a byte of file f at its file offset plus one base,
    a multiple of the page size. PlanError says where it does not.

    Populating alone reads the disk; no readahead is asked for beside it. For granules of 2 MiB
    MADV_HUGEPAGE (see `PagedArena`) makes it read folios of 2 MiB, each then mapped by one entry.
    Medians of 4 interleaved rounds over 1 GiB (2 cores, ext4 on a virtual disk, Linux 6.18), two
    readers, pieces of 8 MiB, GB/s cold and warm: 2.4 and 470; without it 2.2 and 39, with
    POSIX_FADV_SEQUENTIAL 2.9 and 184, but 2.0 and 28 from four readers, where MADV_HUGEPAGE keeps
    2.8 and 248. MADV_WILLNEED and readahead() fill the page cache with small folios (warm 11 to
    20), and MADV_RANDOM reads page by page (cold 0.1).

    The native engine reads past the page cache what that does not keep (`native/mapped.h`).
    """

    _protection = mmap.PROT_READ

    _guard = -1

    def _map(self) -> None:
        self._files = self._find_files()
        for segment in self._files:
            self._map_segment(segment)
        self._prepare()
        if (native := library()) is not None:
            self._guard = native.ps_guard(self._memory.address, self._memory.nbytes)
            if self._guard < 0:
                raise StreamError(
                    "more programs are loaded than can be protected from files that shrink: close some"
                )

    def check(self) -> None:
        # Truncating a file takes its pages from every mapping: a read of them is a SIGBUS, which ends the
        # process unless the native library, if it was built, puts zeros there (`native/guard.h`). What is
        # written into a file appears in every mapping.
        self._source.check_all_unchanged()
        if self._guard >= 0 and (native := library()) is not None and native.ps_guard_hit(self._guard):
            raise SourceError(
                f"a weight file has been truncated while in use, and was read meanwhile: {AGAIN}"
            )

    def close(self) -> None:
        if self._guard >= 0 and (native := library()) is not None:
            native.ps_unguard(self._guard)
            self._guard = -1
        super().close()

    def _find_files(self) -> dict[int, tuple[int, int]]:
        """Returns the file behind each segment, and the layout offset at which that file begins."""
        files: dict[int, tuple[int, int]] = {}
        for index, storage in enumerate(self._storages):
            place = self._places[index]
            for extent in storage.extents if place >= 0 else ():
                start = place + extent.storage_offset
                base = start - extent.file_offset
                segment = bisect_right(self._starts, start) - 1
                mapped = files.setdefault(segment, (extent.file, base))
                inside = segment >= 0 and start + extent.nbytes <= self._segments[segment].stop
                if mapped != (extent.file, base) or base % PAGE or not inside:
                    raise PlanError(
                        f"storage {index} cannot be mapped at layout offset {start}: expected its file "
                        f"{extent.file} in one piece, at a multiple of {PAGE} bytes, got base {base}; "
                        "plan it again"
                    )
        return files

    def _map_segment(self, segment: int) -> None:
        file, base = self._files[segment]
        start, nbytes = self._segment_pages(segment)
        if start < base:
            raise PlanError(
                f"segment {segment} cannot be mapped: it begins at layout offset {start}, before its file "
                f"{file}, whose first byte is at {base}; plan it again"
            )
        self._memory.map_file(start, nbytes, self._source.fd(file), start - base)

    def _bring_pages(self, pages: Pages) -> int:
        if pages.segment not in self._files:
            return 0
        file, base = self._files[pages.segment]
        try:
            advise(pages.address, pages.nbytes, MADV_POPULATE_READ)
        except OSError as error:
            # The file may have shrunk since, which explains more than the errno of populating.
            self._source.check_unchanged(file)
            raise SourceError(
                f"bytes {pages.start - base} to {pages.stop - base} of {self._source.path(file)} could not "
                f"be read into a mapping: {error.strerror}; check the disk, then try again"
            ) from error
        return pages.stop - pages.start
