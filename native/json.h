// JSON text of others, in which nothing is nested so deeply that a copy of it, or its text, would exhaust the stack.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "failure.h"

namespace penstock {

constexpr int DEEPEST = 100;  // a payload has about ten levels, and inputs of programs a few more

// Raises Json::exception for text that is not JSON, and PS_PAYLOAD for deeper JSON than penstock writes.
inline nlohmann::json parse_json(const std::string &text, const std::string &what) {
    return nlohmann::json::parse(text, [&](int depth, nlohmann::json::parse_event_t, nlohmann::json &) {
        if (depth > DEEPEST)
            throw Failure(PS_PAYLOAD, what + " has lists or objects nested in more than " + std::to_string(DEEPEST) +
                                          " others, which penstock does not write: export or compile again");
        return true;
    });
}

}  // namespace penstock
