// What a payload and one of its plans say, as tables that a pass looks things up in.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ranges.h"
#include "sparse/units.h"

namespace penstock {

constexpr int64_t PIECE = 2 << 20;        // bytes that one reader takes at a time
constexpr int64_t MOST_PIECES = 1 << 20;  // of all transfers of a plan: pieces of plans that move more than 2 TiB are larger

struct WeightFile {
    std::string path;
    int64_t nbytes, mtime_ns, inode;
    std::string header_sha256, sampled_sha256;
};

struct Extent {
    int file;
    int64_t file_offset, storage_offset, nbytes;
};

struct Storage {
    int64_t nbytes;
    int64_t phase;  // the address of its first byte modulo 64, by which kernels choose their code
    std::vector<Extent> extents;  // of what the program produces its place in the spill file, behind all files
    bool produced;
    std::string sha256;  // of the bytes, as hexadecimal digits; empty where it is not known
};

// A part of a transfer that one reader copies, into the arena or `out`; `step` waits for it, and step `after` must
// have ended. It is counted at `mark`.
struct Piece {
    Range range;
    int step, after;
    bool out = false;
    int mark = 0;
};

// The pieces of one pass in issue order, and how many are waited for: by the read of step k at k, by the call itself
// at n, the number of steps, and by the end of step k, which waits for what goes out, at n + 1 + k.
struct Queue {
    std::vector<Piece> pieces;
    std::vector<int> counts;
};

struct Method {
    int graph;
    int before;  // the number of the method whose pass comes before as planned, and the place of the one behind
    size_t following;
    std::vector<Ranges> needs;  // by step: what it reads beside the resident ranges
    std::vector<Ranges> takes;  // by step: what it writes, which takes memory when it begins
    bool continues;             // whether it reads what only the method before has written
    std::vector<int> probed;    // steps at which the plan acts, ascending
    std::vector<Ranges> drops;  // by step
    std::map<int, int> opens, closes;  // the probed step that a probe call begins, and the one that it ends
    Queue steady;
    Ranges boundary;
    bool crosses_calls;

    int steps() const { return static_cast<int>(needs.size()); }
};

struct Plan {
    std::vector<WeightFile> files;
    std::vector<Storage> storages;
    bool contiguous, mapped, barrier;
    int64_t granule, arena_bytes;
    int64_t piece;           // bytes, in whole granules
    int64_t outside_bytes;   // of what stays outside the arena
    int64_t repeated_bytes;  // that every pass reads again, at most
    std::vector<int64_t> layout;  // by storage, -1 where it is not in the arena
    std::vector<int64_t> places;  // where a storage lies in the arena's memory, -1 likewise
    Ranges segments, resident;
    bool keeps = false, spills = false;  // whether steps write to the arena, and whether something leaves it
    std::vector<Method> methods;
    std::optional<PoolPlan> pool;

    const Method *method(int graph) const;

    // The pieces of a pass that starts from nothing, or from the resident ranges: its boundary, then its own.
    Queue first_pass(const Method &method, bool resident_loaded) const;

    // The ranges in pieces that several readers can share; and a range with the granules that it begins and ends in.
    Ranges cut(const Ranges &ranges) const;
    Range whole_granules(Range range) const;
};

// Parses and checks both texts. Raises PS_PAYLOAD for what docs/payload.md does not allow.
Plan read_plan(const std::string &payload, const std::string &plan);

}  // namespace penstock
