// The reads by units of a compiled method that the pool of a plan serves.
#pragma once

#include <map>

#include "../aoti/by_units.h"
#include "../json.h"
#include "../penstock.h"

namespace penstock {

// The reads of a method by their numbers in its code, for an engine that runs `plan`. Raises PS_PAYLOAD where plan and
// code do not belong together, PS_PLAN for products by tiles, whose bits nobody has compared here.
std::map<int64_t, PooledRead> pooled_reads(const Json &payload, const Json &plan, int32_t graph,
                                           const ps_engine *engine);

}  // namespace penstock
