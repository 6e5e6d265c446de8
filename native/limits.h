// How much memory this process could still use within the limits of its control groups.
#pragma once

#include <cstdint>
#include <string>

namespace penstock {

constexpr int64_t UNKNOWN = INT64_MAX;

// Returns the bytes that could hold data or page cache, UNKNOWN where the system does not say: runtime/system/limits.py,
// `memory_limit`, in C++. `proc` and `groups` stand for /proc and /sys/fs/cgroup.
int64_t available_bytes(const std::string &proc = "/proc", const std::string &groups = "/sys/fs/cgroup");

}  // namespace penstock
