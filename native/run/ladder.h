// The plans that stand in a payload, for programs without a planner, and the sizes that budgets are given in.
#pragma once

#include <string>

#include "../json.h"

namespace penstock {

// Bytes of all weights of a payload.
int64_t weight_nbytes(const Json &payload);

// The plan of the payload's ladder that a budget allows. Raises PS_PLAN for a budget below all, and where there is no
// plan, with the advice how to get some; `program` is what sentences call the program.
const Json &find_plan(const Json &payload, int64_t budget, const std::string &program, const std::string &advice);

// The bytes that a text stands for: `32MiB`, `8GB`, `50%` of `total`, or bytes. Raises PS_PLAN for any other text.
int64_t parse_size(const std::string &text, int64_t total);
std::string format_size(int64_t nbytes);

}  // namespace penstock
