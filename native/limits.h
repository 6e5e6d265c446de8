// How much memory this process could still use within the limits of its control groups.
#pragma once

#include <cstdint>
#include <string>

namespace penstock {

constexpr int64_t UNKNOWN = INT64_MAX;

// The bytes that could hold data or page cache, UNKNOWN where the system does not say: the least of what the system
// has available and of what is left of the limit of each control group of memory (version 1 or 2) from this
// process's up to the root. The page cache of a group counts as available, because it can be reclaimed.
int64_t available_bytes(const std::string &proc = "/proc", const std::string &groups = "/sys/fs/cgroup");

}  // namespace penstock
