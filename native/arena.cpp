#include "arena.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <unordered_set>

#include "failure.h"

namespace penstock {

namespace {

constexpr int64_t PAGE = 4096, HUGE_PAGE = 2 << 20;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t layout_nbytes(const Plan &plan) { return plan.segments.empty() ? 0 : plan.segments.back().stop; }

[[noreturn]] void refused(int64_t nbytes, const char *what) {
    throw Failure(PS_STREAM, "the system refused " + std::to_string(nbytes) + " bytes of " + what + " for weights (" +
                                 std::strerror(errno) + "): lower the budget or free memory");
}

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Takes memory that has never been touched, piece by piece, from any thread. Huge pages mostly come faster than small
// ones. But what a virtual machine has free in whole huge pages its host may have taken back: after some pieces that
// came slowly, small ones are asked for.
class FreshMemory {
  public:
    void take(char *address, int64_t nbytes) {
        const bool huge = slow_ < PATIENCE;
        madvise(address, nbytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        const double began = thread_seconds();  // not what other threads had meanwhile
        if (madvise(address, nbytes, MADV_POPULATE_WRITE) != 0) {
            if (errno != EINVAL) refused(nbytes, "memory");
            std::memset(address, 0, nbytes);
        }
        if (huge) slow_ = static_cast<double>(nbytes) < SLOW * (thread_seconds() - began) ? slow_ + 1 : 0;
    }

  private:
    static constexpr int PATIENCE = 4;
    static constexpr double SLOW = 1e9;  // bytes a second
    std::atomic<int> slow_{0};
};

// One buffer of the plan's size, whose memory is taken once: direct reads into memory that nobody had touched ran at
// 1.1 GB/s where they ran at 2.7 otherwise.
class ContiguousArena final : public Arena {
  public:
    ContiguousArena(const Plan &plan, const Source &source, bool poison)
        : Arena(plan, source, poison, plan.arena_bytes) {
        map(0, nbytes_);
        FreshMemory fresh;
        for (int64_t start = 0; start < nbytes_; start += HUGE_PAGE)
            fresh.take(memory_ + start, std::min(HUGE_PAGE, round_up(nbytes_ - start, PAGE)));
        if (poison) std::memset(memory_, 0xFF, nbytes_);
    }

  private:
    void discard(Range range) override {
        if (!poison_) return;
        // What is not held may lie where another storage is now.
        for (const Range &held : held_.within(range))
            files_.within(held, [&](const FileRange &one) {
                std::memset(memory_ + one.place, 0xFF, one.range.nbytes());
            });
    }
};

// Address space of the layout's size, in which only filled granules take memory.
class AnonymousArena final : public Arena {
  public:
    AnonymousArena(const Plan &plan, const Source &source, bool poison)
        : Arena(plan, source, poison, layout_nbytes(plan)) {
        if (plan.granule % PAGE)
            throw Failure(PS_PLAN, "a granule of " + std::to_string(plan.granule) + " bytes is no whole pages of " +
                                       std::to_string(PAGE) + ": plan it again");
        for (const Range &segment : plan.segments) {
            const int64_t start = segment.start / PAGE * PAGE;
            map(start, round_up(segment.stop, PAGE) - start);
        }
        // Of a huge page only all can be dropped: a smaller granule would take its neighbours along.
        madvise(memory_, round_up(nbytes_, PAGE), plan.granule % HUGE_PAGE ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    }

  private:
    void discard(Range range) override {
        for (const Range &segment : plan_.segments) {
            const int64_t low = std::max(range.start, segment.start), high = std::min(range.stop, segment.stop);
            if (low >= high) continue;
            char *const start = memory_ + low / PAGE * PAGE;
            if (madvise(start, memory_ + round_up(high, PAGE) - start, MADV_DONTNEED) != 0)
                throw Failure(PS_STREAM, std::string("the system did not take pages of weights back (") +
                                             std::strerror(errno) + ")");
        }
    }
};

// A pool of granules, as many as the plan has room for, which move to where they are filled: from the first fill on
// nothing is allocated, zeroed or copied.
class PooledArena final : public Arena {
  public:
    PooledArena(const Plan &plan, const Source &source, bool poison)
        : Arena(plan, source, poison, layout_nbytes(plan) + plan.arena_bytes),
          pool_(memory_ + layout_nbytes(plan)) {
        if (plan.arena_bytes % plan.granule)
            throw Failure(PS_PLAN, "an arena of " + std::to_string(plan.arena_bytes) + " bytes is no whole granules of " +
                                       std::to_string(plan.granule) + ": plan it again");
        map(0, nbytes_);
        for (int64_t at = plan.arena_bytes; at > 0; at -= plan.granule) free_.push_back(pool_ + at - plan.granule);
    }

    // The granules of a plan can be moved if they are huge pages, none of which a segment cuts.
    static bool serves(const Plan &plan) {
        if (plan.granule % HUGE_PAGE || plan.segments.empty()) return false;
        for (const Range &segment : plan.segments)
            if (segment.start % plan.granule || segment.stop % plan.granule) return false;
        return true;
    }

  private:
    void provide(Range range) override {
        each(range, [this](char *address) {
            char *found;
            {
                std::lock_guard<std::mutex> guard(lock_);
                found = take(address);
                filled_.insert(address);
            }
            if (found >= pool_) fresh_.take(address, plan_.granule);  // none returns to the pool
        });
    }

    void discard(Range range) override {
        each(range, [this](char *address) {
            std::lock_guard<std::mutex> guard(lock_);
            if (!filled_.erase(address)) return;
            if (poison_) std::memset(address, 0xFF, plan_.granule);
            free_.push_back(address);
        });
    }

    // Has a free granule at an address, the one that lies there or any other, and returns where it was.
    char *take(char *address) {
        if (free_.empty()) throw Failure(PS_PLAN, "the plan fills more than its arena holds: plan it again");
        const auto here = std::find(free_.rbegin(), free_.rend(), address);
        const auto chosen = here == free_.rend() ? free_.rbegin() : here;
        char *const found = *chosen;
        if (found != address && mremap(found, plan_.granule, plan_.granule,
                                       MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, address) != address)
            throw Failure(PS_STREAM, std::string("the system did not move memory for weights (") +
                                         std::strerror(errno) + "): raise its limit on mappings (vm.max_map_count)");
        free_.erase(std::next(chosen).base());
        return found;
    }

    template <typename Use>
    void each(Range range, Use use) const {
        if (range.start % plan_.granule || range.stop % plan_.granule)
            throw Failure(PS_PLAN, "a range is not whole granules: plan it again");
        for (int64_t at = range.start; at < range.stop; at += plan_.granule) use(memory_ + at);
    }

    char *const pool_;
    std::mutex lock_;
    std::vector<char *> free_;  // in the pool at first, later wherever they were dropped; the last one goes first
    std::unordered_set<char *> filled_;
    FreshMemory fresh_;
};

}  // namespace

Arena::Arena(const Plan &plan, const Source &source, bool poison, int64_t nbytes)
    : plan_(plan),
      source_(source),
      poison_(poison),
      nbytes_(nbytes),
      // Between two neighbours of a contiguous arena a third may lie: nothing is read along.
      files_(plan, plan.contiguous ? 0 : PAGE) {
    // An inaccessible page on either side stops overruns.
    reserved_nbytes_ = round_up(std::max<int64_t>(nbytes_, 1), PAGE) + 2 * PAGE + HUGE_PAGE;
    reserved_ = mmap(nullptr, reserved_nbytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ == MAP_FAILED) refused(static_cast<int64_t>(reserved_nbytes_), "address space");
    memory_ = reinterpret_cast<char *>(round_up(reinterpret_cast<intptr_t>(reserved_) + PAGE, HUGE_PAGE));
}

Arena::~Arena() { munmap(reserved_, reserved_nbytes_); }

void Arena::map(int64_t start, int64_t nbytes) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (nbytes && mmap(memory_ + start, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
        refused(nbytes, "address space");
}

char *Arena::address(int storage) const {
    const int64_t place = plan_.places[storage];
    return place < 0 ? nullptr : memory_ + place;
}

int64_t Arena::fill(Range range) {
    held_.add(range);  // before it arrives: memory is taken from the first byte on
    int64_t brought = 0;
    try {
        provide(range);
        files_.within(range, [&](const FileRange &one) {
            source_.read(one.file, one.file_offset, memory_ + one.place, one.range.nbytes());
            brought += one.range.nbytes();
        });
    } catch (...) {
        drop(range);
        throw;
    }
    return brought;
}

void Arena::drop(Range range) {
    discard(range);
    held_.remove(range);
}

std::unique_ptr<Arena> open_arena(const Plan &plan, const Source &source, bool poison) {
    if (plan.mapped) throw Failure(PS_PLAN, "this engine has no mapped arena: load it with engine=\"python\"");
    if (plan.contiguous) return std::make_unique<ContiguousArena>(plan, source, poison);
    if (PooledArena::serves(plan)) return std::make_unique<PooledArena>(plan, source, poison);
    return std::make_unique<AnonymousArena>(plan, source, poison);
}

}  // namespace penstock
