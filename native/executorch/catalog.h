// What a payload says of steps and weights, with which the regions of its program have to agree.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "names.h"

namespace penstock {

// ExecuTorch's name of a dtype. Raises PS_PLAN for one that it does not have.
ScalarType scalar_type(const std::string &dtype);

class Catalog {
  public:
    // Of a payload, for a plan of it that runs.
    Catalog(const Json &payload, const Json &plan);

    // Raises PS_PAYLOAD, with the name of the field, for a region that contradicts the payload: docs/payload.md, "A region",
    // has the rules, and backends/executorch/files.py checks the same of all regions at once.
    void check(const Json &region) const;

    // Tells whether a storage of a region is in memory while the region runs: it stays there, or a step of the region reads it.
    bool brings(const Json &region, int64_t storage) const;

    int64_t nbytes(int storage) const { return storages_.at(storage).nbytes; }

  private:
    struct Storage {
        int64_t nbytes;
        bool state, outside;  // of the arena
    };

    void check_appended(const Json &region, size_t index) const;

    std::vector<Storage> storages_;
    std::map<int64_t, std::vector<std::set<int64_t>>> reads_;  // of the steps of each graph
    std::map<std::string, Json> parts_;                        // by the names of tensors
};

}  // namespace penstock
