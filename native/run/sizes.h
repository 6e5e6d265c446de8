// The sizes of a call's inputs, compared with those that the method was exported for.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "../json.h"

namespace penstock {

// Raises PS_PLAN for sizes that the method was not exported for. `symbols` are the method's, and `seen` has the sizes of
// those that inputs before had. With `only_examples`, the sizes of the export are the only ones that are taken.
template <typename Sizes>
void check_sizes(const Json &input, const Sizes &sizes, const Json &symbols, bool only_examples,
                 std::map<std::string, int64_t> &seen) {
    const std::string name = input.at("name");
    const auto refuse = [&](const std::string &expected, size_t position, int64_t got) {
        throw Failure(PS_PLAN, "input " + name + ".shape[" + std::to_string(position) + "]: expected " + expected +
                                   ", got " + std::to_string(got) + "; pass what the program was exported for");
    };
    const Json shape = input.value("shape", Json::array());
    if (shape.size() != sizes.size())
        throw Failure(PS_PLAN, "input " + name + ": expected " + std::to_string(shape.size()) + " dimensions, got " +
                                   std::to_string(sizes.size()) + "; pass what the program was exported for");
    for (size_t k = 0; k < sizes.size(); ++k) {
        const int64_t size = sizes[k];
        if (shape[k].is_number()) {
            if (shape[k] != size) refuse(shape[k].dump() + ", a static size", k, size);
            continue;
        }
        bool found = false;
        for (const Json &symbol : symbols) {
            if (symbol.at("name") != shape[k]) continue;
            found = true;
            const int64_t example = symbol.at("example");
            if (only_examples && size != example)
                refuse(std::to_string(example) + ", as exported: other sizes are checked in Python only", k, size);
            if (size < symbol.at("lower").get<int64_t>() ||
                (!symbol.at("upper").is_null() && size > symbol.at("upper").get<double>()))
                refuse(symbol.at("lower").dump() + " to " + symbol.at("upper").dump(), k, size);
            const auto [known, fresh] = seen.emplace(shape[k], size);
            if (!fresh && known->second != size) refuse(std::to_string(known->second) + ", as in the other inputs", k, size);
        }
        if (!found) throw Failure(PS_PAYLOAD, "input " + name + " has a size that is no symbol of its method: export it again");
    }
}

}  // namespace penstock
