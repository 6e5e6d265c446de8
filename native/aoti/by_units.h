// Reads by units in compiled code: the operators penstock::by_units (docs/payload.md, "Executing a plan"), which stand
// for operators that read of a weight only the slices that an operand names. passes/sparse/ has all of this in Python.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace penstock {

// A read that the pool of a plan serves. Its operator is given `tensor`, in which only units that are held have content;
// a unit is a run of `slices` slices of its dimension 0.
struct PooledRead {
    int32_t step;
    std::string operator_name;  // as payloads have it, `aten.embedding.default`
    int64_t count, slices;
    at::Tensor tensor;
};

// The memory that units come and go in, as one pass sees it; docs are those of ps_units_ask. All but `release` raise.
class Units {
  public:
    virtual ~Units() = default;

    // The read of a number; null where its weight is there as a whole.
    virtual const PooledRead *find(int64_t read) const = 0;

    using Numbers = std::vector<int64_t>;
    virtual std::vector<Numbers> ask(const PooledRead &read, const Numbers &units) = 0;
    virtual void hold(const PooledRead &read, const Numbers &units, bool alone) = 0;
    virtual void release(const PooledRead &read, const Numbers &units) = 0;
};

// Registers the operators, once a process.
void register_by_units();

}  // namespace penstock
