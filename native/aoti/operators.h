// The operators that mark the reads of weights, penstock::acquire and penstock::release, for compiled code that runs
// without Python.
#pragma once

#include <cstdint>
#include <exception>

namespace penstock {

class Units;

// What the probe calls of compiled code reach on the thread of this object, as long as it exists.
class Probes {
  public:
    Probes();
    virtual ~Probes();
    Probes(const Probes &) = delete;

    // Call 2 p is the acquire of probe p, and 2 p + 1 its release. What it raises is kept in `failure`, because torch
    // hands on only that something was.
    virtual void probe(int32_t call) = 0;

    // The memory of what the pass reads by units; null where it reads everything whole.
    virtual Units *units() { return nullptr; }

    static Probes *current();

    std::exception_ptr failure;

  private:
    Probes *const before_;
};

// Registers the operators on torch's stable interface, once. Raises Failure in a process that has other ones.
void register_operators();

}  // namespace penstock
