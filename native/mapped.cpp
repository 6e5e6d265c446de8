#include "mapped.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "failure.h"
#include "limits.h"

namespace penstock {

namespace {

// Bytes a second: 2 MiB are mapped in 2 us if the page cache holds them as one folio, and in 45 to 110 us if it holds
// single pages, as of a file that was written. At most so many granules are read again before one is mapped faster.
constexpr int64_t SMALL = 150'000'000'000;
constexpr int MOST_UNPROVEN = 8;

double wall_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void unmappable(const std::string &what) { throw Failure(PS_PLAN, what + "; plan it again"); }

}  // namespace

MappedArena::MappedArena(const Plan &plan, const Source &source, const ps_options &options)
    : PagedArena(plan, source, options), guard_(memory_.at(0), memory_.nbytes()) {
    find_files();
    map_segments(memory_);
    choose_pages();
}

void MappedArena::check() const {
    source_.check_unchanged();
    if (guard_.hit())
        throw Failure(PS_SOURCE, "a weight file has been truncated while in use, and was read meanwhile: open the "
                                 "artifact again");
}

void MappedArena::find_files() {
    behind_.resize(plan_.segments.size());
    for (size_t s = 0; s < plan_.storages.size(); ++s) {
        if (plan_.places[s] < 0) continue;
        if (plan_.storages[s].produced) unmappable("storage " + std::to_string(s) + " cannot be mapped: it lies in no file");
        for (const Extent &extent : plan_.storages[s].extents) {
            const int64_t start = plan_.places[s] + extent.storage_offset, base = start - extent.file_offset;
            const int segment = segment_of(start);
            const bool inside = segment >= 0 && start + extent.nbytes <= plan_.segments[segment].stop;
            Behind *const found = inside ? &behind_[segment] : nullptr;
            if (found && found->file < 0) *found = {extent.file, base};
            if (!found || found->file != extent.file || found->base != base || base % PAGE)
                unmappable("storage " + std::to_string(s) + " cannot be mapped at layout offset " +
                           std::to_string(start) + ": expected its file " + std::to_string(extent.file) +
                           " in one piece, at a multiple of " + std::to_string(PAGE) + " bytes, got base " +
                           std::to_string(base));
        }
    }
    for (size_t s = 0; s < behind_.size(); ++s) {
        const auto [file, base] = behind_[s];
        if (file < 0) continue;
        const Range pages = segment_pages(s);
        const std::string where = "segment " + std::to_string(s) + " cannot be mapped: it ";
        if (pages.start < base)
            unmappable(where + "begins at layout offset " + std::to_string(pages.start) + ", before its file " +
                       std::to_string(file) + ", whose first byte is at " + std::to_string(base));
        if (pages.stop > base + round_up(plan_.files[file].nbytes, PAGE))
            unmappable(where + "ends at layout offset " + std::to_string(pages.stop) + ", behind its file " +
                       std::to_string(file) + ", whose " + std::to_string(plan_.files[file].nbytes) + " bytes begin at " +
                       std::to_string(base));
    }
}

void MappedArena::map_file(Reservation &memory, size_t segment, Range range) const {
    const Behind &behind = behind_[segment];
    errno = memory.map_file(range.start, range.nbytes(), source_.fd(behind.file), range.start - behind.base);
    if (errno == ENOMEM) refused(range.nbytes(), "address space");
    if (errno)
        throw Failure(PS_SOURCE, source_.path(behind.file) + " could not be mapped (" + std::strerror(errno) +
                                     "): check the disk, then try again");
}

void MappedArena::map_segments(Reservation &memory) const {
    for (size_t s = 0; s < behind_.size(); ++s)
        if (behind_[s].file >= 0) map_file(memory, s, segment_pages(s));
}

void MappedArena::forget(size_t segment, Range range) const {
    const Behind &behind = behind_[segment];
    posix_fadvise(source_.fd(behind.file), range.start - behind.base, range.nbytes(), POSIX_FADV_DONTNEED);
}

int64_t MappedArena::bring(Range range) {
    int64_t brought = 0;
    pages(range, [&](const Pages &some) {
        const Behind &behind = behind_[some.segment];
        if (behind.file < 0) return;
        if (const int error = populate(some.address, some.nbytes)) {
            source_.check_unchanged(behind.file);  // that the file has shrunk explains more than the error does
            throw Failure(PS_SOURCE, "bytes " + std::to_string(some.range.start - behind.base) + " to " +
                                         std::to_string(some.range.stop - behind.base) + " of " +
                                         source_.path(behind.file) + " could not be read into a mapping (" +
                                         std::strerror(error) + "); check the disk, then try again");
        }
        brought += some.range.nbytes();
    });
    return brought;
}

AdaptiveArena::AdaptiveArena(const Plan &plan, const Source &source, const ps_options &options)
    : MappedArena(plan, source, options),
      granules_(memory_.nbytes() / plan.granule + 1),
      spares_(plan.granule, plan.arena_bytes / plan.granule),
      cache_holds_all_(source.nbytes() <= (options.available ? options.available : available_bytes())) {
    if (source.tells_cached()) {
        cache_ = std::make_unique<Reservation>(memory_.nbytes());
        map_segments(*cache_);
    }
}

std::optional<int64_t> AdaptiveArena::fill_ready(Range range) {
    const int64_t first = round_down(range.start, plan_.granule), last = round_down(range.stop - 1, plan_.granule);
    {
        std::lock_guard<std::mutex> guard(lock_);
        for (int64_t granule = first; granule <= last; granule += plan_.granule)
            if (at(granule).filled) return std::nullopt;
    }
    if (!cached(first) || (last != first && !cached(last))) return std::nullopt;  // asking costs a third of mapping
    if (worth_reading(range)) return std::nullopt;
    return hold(range, [this](Range whole) { return bring_cached(whole); });
}

// The range as runs of granules that are brought alike.
int64_t AdaptiveArena::bring(Range range) {
    int64_t brought = 0;
    Range run{range.start, range.start};
    bool past = false;
    const auto finish = [&] {
        if (run.start < run.stop) brought += past ? bring_private(run) : bring_mapped(run);
    };
    for (int64_t start = range.start; start < range.stop;) {
        const int64_t stop = std::min(round_down(start, plan_.granule) + plan_.granule, range.stop);
        const bool also = goes_past_cache({start, stop});
        if (also != past) {
            finish();
            run = {start, start}, past = also;
        }
        run.stop = start = stop;
    }
    finish();
    return brought;
}

// The memory of private granules is kept for the next fill.
void AdaptiveArena::discard(Range range) {
    int64_t start = range.start;
    for (int64_t granule = round_down(start, plan_.granule); granule < range.stop; granule += plan_.granule) {
        {
            std::lock_guard<std::mutex> guard(lock_);
            if (!at(granule).filled) continue;
            at(granule).filled = false;
            spares_.give(memory_.at(granule));
        }
        if (start < granule) MappedArena::discard({start, granule});
        start = granule + plan_.granule;
    }
    if (start < range.stop) MappedArena::discard({start, range.stop});
}

// Maps what the cache holds, on the thread of the call.
int64_t AdaptiveArena::bring_cached(Range range) {
    place_mapped(range);
    const double began = thread_seconds();
    const int64_t brought = MappedArena::bring(range);
    note(range, brought, thread_seconds() - began);
    return brought;
}

int64_t AdaptiveArena::bring_mapped(Range range) {
    place_mapped(range);
    const double began = wall_seconds();
    const bool again = worth_reading(range);
    if (again) empty_cache(range);
    const int64_t brought = MappedArena::bring(range);
    std::lock_guard<std::mutex> guard(lock_);
    if (again) small_seconds_ -= wall_seconds() - began;
    return brought;
}

// Has the granules of a range mapped to their file.
void AdaptiveArena::place_mapped(Range range) {
    std::lock_guard<std::mutex> guard(lock_);
    // Gives spare memory back until spare, held and filling granules together are within the arena.
    int64_t held, peak;
    held_.sizes(&held, &peak);
    spares_.keep(std::max<int64_t>(0, plan_.arena_bytes - held) / plan_.granule);
    each(range, [this](int64_t start, Granule &granule) {
        if (!granule.moved) return;
        spares_.vacate(memory_.at(start));
        map_file(memory_, segment_of(start), {start, start + plan_.granule});
        hint(memory_.at(start), plan_.granule, MADV_HUGEPAGE);
        granule.moved = false;
    });
}

// Whether some granule should be read again: not for more seconds than mapping single pages has taken so far, as with
// renting and buying, so that both together never take twice what the better of the two would have.
bool AdaptiveArena::worth_reading(Range range) {
    std::lock_guard<std::mutex> guard(lock_);
    bool worth = false;
    if (cache_holds_all_ && small_seconds_ > 0 && unproven_ < MOST_UNPROVEN)
        each(range, [&](int64_t, Granule &granule) { worth |= granule.folios == Folios::SMALL; });
    return worth;
}

// Takes small folios out of the page cache.
void AdaptiveArena::empty_cache(Range range) {
    each(range, [this](int64_t start, Granule &granule) {
        if (granule.folios != Folios::SMALL) return;
        forget(segment_of(start), {start, start + plan_.granule});
        const bool stays = is_cached(cache_->at(start), plan_.granule);
        std::lock_guard<std::mutex> guard(lock_);
        if (!stays) {
            granule.folios = Folios::READ_AGAIN;
            ++unproven_;
        } else if (--granule.tries == 0) {
            granule.folios = Folios::LEFT;
        }
    });
}

// Notes how long it took to map a range from the page cache.
void AdaptiveArena::note(Range range, int64_t brought, double seconds) {
    std::lock_guard<std::mutex> guard(lock_);
    const auto rate = static_cast<double>(options_.small_folios ? options_.small_folios : SMALL);
    const bool small = static_cast<double>(brought) < rate * seconds;
    each(range, [&](int64_t start, Granule &granule) {
        if (!small && granule.folios == Folios::READ_AGAIN) unproven_ = 0;
        if (small && granule.folios == Folios::UNKNOWN && is_whole({start, start + plan_.granule}))
            granule.folios = Folios::SMALL;
    });
    if (small) small_seconds_ += seconds;
}

int64_t AdaptiveArena::bring_private(Range range) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        for (int64_t granule = range.start; granule < range.stop; granule += plan_.granule) {
            if (at(granule).filled) continue;
            if (!spares_.take(memory_.at(granule))) {
                memory_.map_anonymous(granule, plan_.granule);
                hint(memory_.at(granule), plan_.granule, MADV_HUGEPAGE);
            }
            at(granule).filled = at(granule).moved = true;
        }
    }
    return read(range);
}

bool AdaptiveArena::goes_past_cache(Range cut) {
    std::lock_guard<std::mutex> guard(lock_);
    Granule &granule = at(cut.start);
    if (granule.filled) return true;
    if (!is_whole(cut) || cached(cut.start)) return false;
    if (!asks_cache()) return !cache_holds_all_;
    if (granule.past || !cache_holds_all_) {
        granule.past = std::max(0, granule.past - 1);
        return true;
    }
    granule.past = granule.next;
    granule.next *= 2;
    return false;
}

// Whether a range within one granule is all of it, and no end of a segment cuts it.
bool AdaptiveArena::is_whole(Range cut) const {
    const int segment = segment_of(cut.start);
    return segment >= 0 && cut.nbytes() == plan_.granule && cut.stop <= plan_.segments[segment].stop;
}

bool AdaptiveArena::cached(int64_t granule) const {
    if (!asks_cache()) return false;
    const int segment = std::max(0, segment_of(granule));
    return is_cached(cache_->at(round_down(std::max(granule, plan_.segments[segment].start), PAGE)));
}

AdaptiveArena::Spares::Spares(int64_t granule, int64_t slots)
    : FreeGranules(granule, slots), memory_(round_up(granule * std::max<int64_t>(1, slots), HUGE_PAGE)) {
    for (int64_t slot = 0; slot < slots; ++slot) slots_.push_back(memory_.at(slot * granule));
}

bool AdaptiveArena::Spares::take(char *address) {
    char *const found = FreeGranules::take(address);
    empty(found);
    return found != nullptr;
}

void AdaptiveArena::Spares::vacate(char *address) {
    const auto found = std::find(free_.begin(), free_.end(), address);
    if (found == free_.end()) return;
    if (slots_.empty()) throw Failure(PS_PLAN, "the plan fills more than its arena holds: plan it again");
    char *const slot = slots_.back();
    move(address, slot);
    slots_.pop_back();
    free_.erase(found);
    free_.insert(free_.begin(), slot);
}

void AdaptiveArena::Spares::keep(int64_t most) {
    while (static_cast<int64_t>(free_.size()) > most) {
        char *const last = free_.back();
        drop_pages(last, granule_);
        free_.pop_back();
        empty(last);
    }
}

// Frees the slot that a granule has left, where it was in one.
void AdaptiveArena::Spares::empty(char *address) {
    if (memory_.at(0) <= address && address < memory_.at(memory_.nbytes())) slots_.push_back(address);
}

}  // namespace penstock
