#include "arena.h"

#include <sys/mman.h>

#include <cstring>

#include "failure.h"
#include "limits.h"
#include "mapped.h"

namespace penstock {

namespace {

constexpr int64_t OWN_BYTES = 8 << 20;  // that an engine takes beside its arena, page tables included
constexpr int64_t UNIT_BYTES = 32;      // that Residency keeps for each unit,
constexpr int64_t GRANULE_BYTES = 32;   // and AdaptiveArena for each granule

// Whether so much memory can be had: the system kills a process that takes more than its group has.
bool has_room(int64_t nbytes, int64_t available) { return nbytes <= available - OWN_BYTES; }

void refuse_without_room(int64_t nbytes) {
    const int64_t available = available_bytes();
    if (!has_room(nbytes, available))
        throw Failure(PS_STREAM, "weights take " + std::to_string(nbytes) + " bytes of memory, and " +
                                     std::to_string(OWN_BYTES) + " the engine itself, where the system or a control "
                                     "group leaves " + std::to_string(available) +
                                     ": lower the budget, or raise the group's limit");
}

int64_t layout_nbytes(const Plan &plan) { return plan.segments.empty() ? 0 : plan.segments.back().stop; }

// One buffer of the plan's size, whose memory is taken once: direct reads into memory that nobody had touched ran at
// 1.1 GB/s where they ran at 2.7 otherwise.
class ContiguousArena final : public Arena {
  public:
    ContiguousArena(const Plan &plan, const Source &source, const ps_options &options)
        : Arena(plan, source, options, plan.arena_bytes) {
        memory_.map_anonymous(0, memory_.nbytes());
        FreshMemory fresh;
        for (int64_t start = 0; start < memory_.nbytes(); start += HUGE_PAGE)
            fresh.take(memory_.at(start), std::min(HUGE_PAGE, memory_.nbytes() - start));
        if (poison_) std::memset(memory_.at(0), 0xFF, plan.arena_bytes);
    }

  private:
    void discard(Range range) override {
        if (!poison_) return;
        // What is not held may lie where another storage is now.
        for (const Range &held : held_.within(range))
            files_.within(held, [&](const FileRange &one) {
                std::memset(memory_.at(one.place), 0xFF, one.range.nbytes());
            });
    }
};

// Address space of the layout's size, in which only filled granules take memory.
class AnonymousArena final : public PagedArena {
  public:
    AnonymousArena(const Plan &plan, const Source &source, const ps_options &options) : PagedArena(plan, source, options) {
        // Segment by segment, so that no huge page crosses the end of one.
        for (size_t s = 0; s < plan.segments.size(); ++s) {
            const Range range = segment_pages(s);
            memory_.map_anonymous(range.start, range.nbytes());
        }
        choose_pages();
    }

  private:
    int64_t bring(Range range) override {
        make_room(range);
        int64_t brought = 0;
        pages(range, [&](const Pages &some) { brought += read(some.range); });
        return brought;
    }

    // For the bytes that a plan has room for, `open_arena` has found memory. One that fills more is not proved.
    void make_room(Range range) override {
        int64_t held, peak;
        held_.sizes(&held, &peak);
        if (held > plan_.arena_bytes) refuse_without_room(range.nbytes());
    }
};

}  // namespace

Arena::Arena(const Plan &plan, const Source &source, const ps_options &options, int64_t nbytes)
    : plan_(plan),
      source_(source),
      options_(options),
      poison_(options.poison),
      memory_(nbytes),
      // Between two neighbours of a contiguous arena a third may lie: nothing is read along.
      files_(plan.storages, plan.layout, plan.places, plan.contiguous ? 0 : PAGE) {}

char *Arena::address(int storage) const {
    const int64_t place = plan_.places[storage];
    return place < 0 ? nullptr : memory_.at(place);
}

int64_t Arena::fill(Range range) {
    return hold(range, [this](Range whole) { return bring(whole); });
}

void Arena::take(Range range) {
    hold(range, [this](Range whole) { return make_room(whole), int64_t{0}; });
}

int64_t Arena::write_out(Range range) const {
    int64_t written = 0;
    files_.within(range, [&](const FileRange &one) {
        source_.write(one.file_offset, memory_.at(one.place), one.range.nbytes());
        written += one.range.nbytes();
    });
    return written;
}

void Arena::drop(Range range) {
    tell(PS_DROP, range);
    discard(range);
    held_.remove(range);
}

int64_t Arena::read(Range range) const {
    int64_t brought = 0;
    files_.within(range, [&](const FileRange &one) {
        source_.read(one.file, one.file_offset, memory_.at(one.place), one.range.nbytes());
        brought += one.range.nbytes();
    });
    return brought;
}

PagedArena::PagedArena(const Plan &plan, const Source &source, const ps_options &options)
    : Arena(plan, source, options, layout_nbytes(plan)) {
    if (plan.granule % PAGE)
        throw Failure(PS_PLAN, "a granule of " + std::to_string(plan.granule) + " bytes is no whole pages of " +
                                   std::to_string(PAGE) + ": plan it again");
}

void PagedArena::discard(Range range) {
    pages(range, [](const Pages &some) { drop_pages(some.address, some.nbytes); });
}

Range PagedArena::segment_pages(size_t segment) const {
    return {round_down(plan_.segments[segment].start, PAGE), round_up(plan_.segments[segment].stop, PAGE)};
}

int PagedArena::segment_of(int64_t offset) const {
    const auto behind = std::upper_bound(plan_.segments.begin(), plan_.segments.end(), offset,
                                         [](int64_t at, const Range &one) { return at < one.start; });
    return static_cast<int>(behind - plan_.segments.begin()) - 1;
}

void PagedArena::choose_pages() {
    hint(memory_.at(0), memory_.nbytes(), plan_.granule % HUGE_PAGE ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}

void PagedArena::refuse_inside_page(Range range, const Range &segment) {
    if ((range.start % PAGE && range.start > segment.start) || (range.stop % PAGE && range.stop < segment.stop))
        throw Failure(PS_PLAN, "the range " + std::to_string(range.start) + " to " + std::to_string(range.stop) +
                                   " begins or ends inside a page of " + std::to_string(PAGE) +
                                   " bytes: make the plan's granule a multiple of the page size");
}

std::unique_ptr<Arena> open_arena(const Plan &plan, const Source &source, const ps_options &options) {
    if (options.debug && plan.arena_bytes && !plan.contiguous)
        throw Failure(PS_PLAN, "the native engine cannot make reads of dropped weights fault in a paged arena: leave "
                               "check_reads=True out, or plan with arena='contiguous'");
    const int64_t units = plan.pool ? plan.pool->nbytes + UNIT_BYTES * plan.pool->units : 0;
    const int64_t beside = plan.outside_bytes + units;  // what stays outside of the arena comes later, and so do units
    const int64_t whole = plan.arena_bytes + beside;
    if (plan.mapped && !plan.contiguous && source.maps() && supports_populate()) {
        // What is mapped can always be taken back; private granules and what is outside cannot.
        if (beside) refuse_without_room(beside);
        const bool adapts = source.direct() && plan.granule % HUGE_PAGE == 0 && supports_move();
        const int64_t kept = GRANULE_BYTES * (layout_nbytes(plan) / plan.granule);
        if (adapts && has_room(whole + kept, available_bytes())) return std::make_unique<AdaptiveArena>(plan, source, options);
        return std::make_unique<MappedArena>(plan, source, options);
    }
    refuse_without_room(whole);
    if (plan.contiguous) return std::make_unique<ContiguousArena>(plan, source, options);
    return std::make_unique<AnonymousArena>(plan, source, options);
}

}  // namespace penstock
