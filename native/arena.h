// Memory that weights stream into: a reservation of address space in which every storage has a fixed place.
#pragma once

#include <memory>
#include <optional>

#include "files.h"
#include "memory.h"

namespace penstock {

class Arena {
  public:
    Arena(const Plan &plan, const Source &source, const ps_options &options, int64_t nbytes);
    virtual ~Arena() = default;
    Arena(const Arena &) = delete;

    char *address(int storage) const;

    // Makes a range hold its bytes, and returns how many came. Disjoint ranges may be filled by several threads at
    // once. Raises PS_SOURCE where the bytes cannot be had; the range is then dropped.
    int64_t fill(Range range);

    // Gives a range memory, which a program is about to write; what is held of it keeps its bytes.
    void take(Range range);

    // Writes the bytes of a range, which stays as it is, to the spill file; returns how many.
    int64_t write_out(Range range) const;

    // Does what `fill` does if that needs no waiting; otherwise nothing.
    virtual std::optional<int64_t> fill_ready(Range) { return std::nullopt; }

    // Drops a range, of which nothing may be read until it is filled again.
    void drop(Range range);

    // Raises PS_SOURCE when bytes that are held can no longer be read, or may not be the file's. Called every few
    // milliseconds, and when a pass begins and ends. Nobody else can change private memory.
    virtual void check() const {}

    void sizes(int64_t *now, int64_t *peak) const { held_.sizes(now, peak); }

    // The address space that pages of weights are in.
    virtual std::vector<const Reservation *> memory() const { return {&memory_}; }

  protected:
    // Brings the bytes of a range, and returns how many; gives back the memory that a range takes.
    virtual int64_t bring(Range range) { return read(range); }
    virtual void discard(Range range) = 0;

    // Puts memory behind what is not filled of a range.
    virtual void make_room(Range) {}

    int64_t read(Range range) const;

    template <typename Bring>
    int64_t hold(Range range, Bring bring) {
        held_.add(range);  // before it arrives: memory is taken from the first byte on
        tell(PS_FILL, range);
        try {
            const int64_t brought = bring(range);
            tell(PS_FILLED, range);
            return brought;
        } catch (...) {
            drop(range);
            throw;
        }
    }

    void tell(ps_event event, Range range) const {
        if (options_.log) options_.log(options_.context, event, range.start, range.stop);
    }

    const Plan &plan_;
    const Source &source_;
    const ps_options &options_;
    const bool poison_;
    Reservation memory_;
    HeldRanges held_;
    FileRanges files_;
};

// Bytes of a segment, and the whole pages that hold them.
struct Pages {
    size_t segment;
    Range range;
    char *address;
    int64_t nbytes;
};

// An arena in which every storage lies at its layout offset, and pages come and go.
class PagedArena : public Arena {
  public:
    PagedArena(const Plan &plan, const Source &source, const ps_options &options);

  protected:
    void discard(Range range) override;

    // The pages of a segment, from the arena's start on.
    Range segment_pages(size_t segment) const;

    // The last segment that begins at or before a layout offset; -1 before the first.
    int segment_of(int64_t offset) const;

    // Chooses the size of pages, once memory is mapped: of a huge page only all can be dropped, so that a smaller
    // granule would take its neighbours along.
    void choose_pages();

    template <typename Use>
    void pages(Range range, Use use) const {
        for (size_t s = std::max(0, segment_of(range.start)); s < plan_.segments.size(); ++s) {
            const Range &segment = plan_.segments[s];
            const Range cut{std::max(range.start, segment.start), std::min(range.stop, segment.stop)};
            if (segment.start >= range.stop) return;
            if (cut.start >= cut.stop) continue;
            refuse_inside_page(cut, segment);
            const int64_t start = round_down(cut.start, PAGE);
            use(Pages{s, cut, memory_.at(start), round_up(cut.stop, PAGE) - start});
        }
    }

  private:
    static void refuse_inside_page(Range range, const Range &segment);
};

// Raises PS_PLAN for a plan that does not belong to the files, PS_STREAM where there is no memory.
std::unique_ptr<Arena> open_arena(const Plan &plan, const Source &source, const ps_options &options);

}  // namespace penstock
