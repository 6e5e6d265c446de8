// Which reads a pool serves among those whose storage has a place in it: docs/payload.md, "Pool".
#pragma once

#include <nlohmann/json.hpp>

namespace penstock {

inline bool serves(const nlohmann::json &pool, const nlohmann::json &read) {
    if (read.value("tiles", false)) return pool.value("tiles", false);
    return pool.value("dense", true) || read.at("asked") < read.at("view").at("shape").at(0);
}

}  // namespace penstock
