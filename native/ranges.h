// Half-open ranges of bytes, their unions, and sums of sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "failure.h"

namespace penstock {

// The largest size or count that a file may have (schedule/facts/validity.py has the same): far above any model, and so far
// below overflow that a few of them, times 16, can be added.
constexpr int64_t LARGEST_SIZE = int64_t{1} << 50;

// Adds a size to a sum. Raises PS_PAYLOAD for a sum above the largest size.
inline int64_t add_size(int64_t sum, int64_t nbytes) {
    if (__builtin_add_overflow(sum, nbytes, &sum) || sum > LARGEST_SIZE)
        throw Failure(PS_PAYLOAD, "the sizes in the payload add up to more than " + std::to_string(LARGEST_SIZE) +
                                      " bytes, which no model has: export or compile again");
    return sum;
}

struct Range {
    int64_t start, stop;
    int64_t nbytes() const { return stop - start; }
    bool operator<(const Range &other) const {
        return start != other.start ? start < other.start : stop < other.stop;
    }
};

using Ranges = std::vector<Range>;

// The same bytes in as few ranges as possible, ascending.
inline Ranges merged(Ranges ranges) {
    std::sort(ranges.begin(), ranges.end());
    Ranges result;
    for (const Range &one : ranges) {
        if (!result.empty() && one.start <= result.back().stop)
            result.back().stop = std::max(result.back().stop, one.stop);
        else
            result.push_back(one);
    }
    return result;
}

// The bytes of `ranges` that are in none of `taken`, which are ascending and disjoint.
inline Ranges subtract(const Ranges &ranges, const Ranges &taken) {
    Ranges rest;
    for (const Range &item : ranges) {
        int64_t start = item.start;
        auto hole = std::lower_bound(taken.begin(), taken.end(), start,
                                     [](const Range &one, int64_t at) { return one.stop <= at; });
        for (; hole != taken.end() && hole->start < item.stop; ++hole) {
            if (hole->start > start) rest.push_back({start, hole->start});
            start = std::max(start, hole->stop);
        }
        if (start < item.stop) rest.push_back({start, item.stop});
    }
    return rest;
}

// The union of ranges, its size now and at most. Several threads may use it at once.
class HeldRanges {
  public:
    void add(Range range) { set(range, true); }
    void remove(Range range) { set(range, false); }

    Ranges within(Range range) const {
        std::lock_guard<std::mutex> guard(lock_);
        Ranges found;
        auto one = held_.upper_bound(range.start);
        if (one != held_.begin()) --one;
        for (; one != held_.end() && one->first < range.stop; ++one) {
            const Range part{std::max(one->first, range.start), std::min(one->second, range.stop)};
            if (part.start < part.stop) found.push_back(part);
        }
        return found;
    }

    void sizes(int64_t *now, int64_t *peak) const {
        std::lock_guard<std::mutex> guard(lock_);
        *now = nbytes_, *peak = peak_;
    }

  private:
    void set(Range range, bool held) {
        if (range.start >= range.stop) return;
        std::lock_guard<std::mutex> guard(lock_);
        auto one = held_.lower_bound(range.start);
        if (one != held_.begin() && std::prev(one)->second >= range.start) --one;
        Range whole = range;
        Ranges beyond;
        while (one != held_.end() && one->first <= range.stop) {
            const Range old{one->first, one->second};
            nbytes_ -= old.nbytes();
            one = held_.erase(one);
            whole = {std::min(whole.start, old.start), std::max(whole.stop, old.stop)};
            if (old.start < range.start) beyond.push_back({old.start, std::min(old.stop, range.start)});
            if (old.stop > range.stop) beyond.push_back({std::max(old.start, range.stop), old.stop});
        }
        if (held) beyond = {whole};
        for (const Range &part : beyond) put(part);
        peak_ = std::max(peak_, nbytes_);
    }

    void put(Range range) {
        held_[range.start] = range.stop;
        nbytes_ += range.nbytes();
    }

    mutable std::mutex lock_;
    std::map<int64_t, int64_t> held_;
    int64_t nbytes_ = 0, peak_ = 0;
};

}  // namespace penstock
