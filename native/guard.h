// What protects the process from files that shrink while they are mapped.
#pragma once

#include <cstdint>

namespace penstock {

// Truncating a file takes its pages from every mapping, and a kernel that reads one of them ends the process by SIGBUS.
// In memory that is guarded, the signal's handler puts a page of zeros there instead, and the guard is hit: what was
// computed meanwhile is worth nothing, and neither is the mapping from then on. Other faults go to whoever had the signal
// before. The handler is installed with the first guard, and again where another has taken its place by then.
// Returns a number for the other two; -1 where there are too many.
int32_t guard(const void *memory, int64_t nbytes);
void unguard(int32_t number);
bool guard_hit(int32_t number);

// Guards memory for as long as it lives. Raises PS_STREAM where there are too many.
class Guard {
  public:
    Guard(const void *memory, int64_t nbytes);
    ~Guard() { unguard(number_); }
    Guard(const Guard &) = delete;

    bool hit() const { return guard_hit(number_); }

  private:
    const int32_t number_;
};

}  // namespace penstock
