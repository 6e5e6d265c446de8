// Memory that weights stream into: a reservation of address space in which every storage has a fixed place.
#pragma once

#include <memory>

#include "files.h"

namespace penstock {

class Arena {
  public:
    Arena(const Plan &plan, const Source &source, bool poison, int64_t nbytes);
    virtual ~Arena();
    Arena(const Arena &) = delete;

    char *address(int storage) const;

    // Makes a range hold its bytes, and returns how many came. Disjoint ranges may be filled by several threads at
    // once. Raises PS_SOURCE where the bytes cannot be had; the range is then dropped.
    int64_t fill(Range range);

    // Drops a range, of which nothing may be read until it is filled again.
    void drop(Range range);

    void sizes(int64_t *now, int64_t *peak) const { held_.sizes(now, peak); }

  protected:
    // Has memory where a range is about to be read to, and gives it back.
    virtual void provide(Range) {}
    virtual void discard(Range range) = 0;

    void map(int64_t start, int64_t nbytes);

    const Plan &plan_;
    const Source &source_;
    const bool poison_;
    int64_t nbytes_;
    char *memory_ = nullptr;
    HeldRanges held_;
    FileRanges files_;

  private:
    void *reserved_ = nullptr;
    size_t reserved_nbytes_ = 0;
};

// Raises PS_PLAN for a plan whose kind of arena this engine does not have, PS_STREAM where there is no memory.
std::unique_ptr<Arena> open_arena(const Plan &plan, const Source &source, bool poison);

}  // namespace penstock
