// Arenas that map the weight files themselves.
#pragma once

#include "arena.h"
#include "guard.h"

namespace penstock {

// The weight files, one after another, of which only what has been filled is in the page tables: nothing is copied.
class MappedArena : public PagedArena {
  public:
    MappedArena(const Plan &plan, const Source &source, const ps_options &options);

    // Truncating a file takes its pages from every mapping. What is written into it appears in every mapping.
    void check() const override;

  protected:
    int64_t bring(Range range) override;

    // Takes bytes of a segment, unmapped ones in whole pages, out of the page cache, where nothing else maps them.
    void forget(size_t segment, Range range) const;

    // Maps layout bytes of a segment, whole pages, at the same offset of `memory`.
    void map_file(Reservation &memory, size_t segment, Range range) const;
    void map_segments(Reservation &memory) const;

  private:
    struct Behind {
        int file = -1;
        int64_t base = 0;  // where its first byte would lie in the layout
    };

    void find_files();

    std::vector<Behind> behind_;  // by segment
    Guard guard_;
};

// The same, but granules that the page cache does not hold are read past it into private memory. One that was lost
// from the cache is read past it some times before it is cached again; a cache without room for all files is left
// alone. One that the cache holds page by page is brought into it again in one piece. Mapped granules, private ones and
// spare private ones together never exceed the plan's arena. Granules that an end of their segment cuts are always mapped.
class AdaptiveArena final : public MappedArena {
  public:
    AdaptiveArena(const Plan &plan, const Source &source, const ps_options &options);

    std::optional<int64_t> fill_ready(Range range) override;
    std::vector<const Reservation *> memory() const override { return {&memory_, &spares_.memory()}; }

  private:
    // Spare granules of private memory, where they were used last or in slots of their own.
    class Spares : public FreeGranules {
      public:
        Spares(int64_t granule, int64_t slots);
        bool take(char *address);
        void vacate(char *address);  // moves the spare granule there, if there is one, to a slot of its own
        void keep(int64_t most);     // gives memory back until so many are left
        const Reservation &memory() const { return memory_; }

      private:
        void empty(char *address);

        Reservation memory_;
        std::vector<char *> slots_;
    };

    // How the page cache holds a granule: SMALL ones, page by page, are worth reading again.
    enum class Folios : char { UNKNOWN, SMALL, READ_AGAIN, LEFT };

    struct Granule {
        Folios folios = Folios::UNKNOWN;
        char tries = 8;       // to take it out of the cache, where dirty pages and such that others map stay
        bool filled = false;  // in private memory
        bool moved = false;   // not mapped to the file at the moment
        int past = 0;         // reads past the cache that are left before it is cached again,
        int next = 32;        // and how many there are the next time
    };

    int64_t bring(Range range) override;
    void discard(Range range) override;
    int64_t bring_cached(Range range);
    int64_t bring_mapped(Range range);
    void place_mapped(Range range);
    bool worth_reading(Range range);
    void empty_cache(Range range);
    void note(Range range, int64_t brought, double seconds);
    bool is_whole(Range cut) const;
    int64_t bring_private(Range range);
    bool goes_past_cache(Range cut);
    bool asks_cache() const { return cache_ != nullptr; }
    bool cached(int64_t granule) const;

    template <typename Use>
    void each(Range range, Use use) {
        for (int64_t granule = round_down(range.start, plan_.granule); granule < range.stop; granule += plan_.granule)
            use(granule, at(granule));
    }
    Granule &at(int64_t offset) { return granules_[offset / plan_.granule]; }

    std::mutex lock_;
    std::vector<Granule> granules_;
    Spares spares_;
    std::unique_ptr<Reservation> cache_;  // mapped only to ask about: there is no answer for private memory
    const bool cache_holds_all_;
    double small_seconds_ = 0;  // that mapping single pages took, without those that reading them again took
    int unproven_ = 0;          // granules that were read again since one was seen to be mapped faster
};

}  // namespace penstock
