// What a plan says of its pool: which storages have their units there, and the reads of steps that name some of them.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "../ranges.h"

namespace penstock {

// A read of which a call names the units that it needs: slices of a storage on dimension 0, or runs of several.
struct UnitRead {
    int storage;
    int64_t count;           // of units
    int64_t offset, stride;  // bytes to the first, from each to the next
    int64_t nbytes;          // from the first to the last item of a unit
    int64_t route, asked;    // reads of one route name the same units, at the exported sizes at most so many
};

// The granules from `first` to the one before `stop`.
struct Granules {
    int64_t first, stop;
};

// The reads of a method that a pool serves, by step.
struct UnitSteps {
    int graph;
    std::map<int, UnitRead> reads;
};

struct PoolPlan {
    int64_t nbytes, granule;
    int64_t units;  // of all storages
    std::vector<int64_t> layout;  // by storage, -1 where its units are not in the pool
    std::vector<UnitSteps> methods;

    // The granules that hold a unit.
    Granules granules(const UnitRead &read, int64_t number) const {
        const int64_t start = layout[read.storage] + read.offset + number * read.stride, stop = start + read.nbytes;
        return {start / granule, (stop + granule - 1) / granule};
    }

    Range bytes(Granules some) const { return {some.first * granule, some.stop * granule}; }
};

}  // namespace penstock
