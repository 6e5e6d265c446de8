// The pool of a plan, and which reads it serves among those whose storage has a place in it: docs/payload.md, "Pool".
#pragma once

#include "../json.h"
#include "../plan.h"

namespace penstock {

inline bool serves(const Json &pool, const Json &read) {
    if (read.value("tiles", false)) return pool.value("tiles", false);
    return pool.value("dense", true) || read.at("asked") < read.at("view").at("shape").at(0);
}

// Reads the pool of a plan that has one. Raises PS_PAYLOAD for one that cannot serve each of its reads.
PoolPlan read_pool(const Json &plan, const std::vector<Storage> &storages);

}  // namespace penstock
