// JSON of others: copying or printing it cannot exhaust the stack, and each number fits the type that it is read as.
#pragma once

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "ranges.h"

namespace penstock {

constexpr int DEEPEST = 100;  // a payload has about ten levels, and inputs of programs a few more

// Raised for a number that is too large, too small, or not whole: a Json::exception like those of other types.
struct NumberFault : nlohmann::detail::exception {
    explicit NumberFault(const std::string &text) : exception(501, text.c_str()) {}
};

// Converts JSON to C++ values. nlohmann's own conversion takes 1e30, 2^40 and -1 for an int or a size_t without a word.
template <typename Value, typename = void>
struct Conversion : nlohmann::adl_serializer<Value> {};

template <typename Number>
struct Conversion<Number, std::enable_if_t<std::is_integral_v<Number> && !std::is_same_v<Number, bool>>> {
    template <typename Json>
    static void from_json(const Json &json, Number &number) {
        using Limits = std::numeric_limits<Number>;
        constexpr auto most = static_cast<int64_t>(std::min<uint64_t>(LARGEST_SIZE, Limits::max()));
        constexpr auto least = static_cast<int64_t>(std::max<int64_t>(-LARGEST_SIZE, Limits::min()));
        // nlohmann has a number of 0 or more as unsigned, and any other whole one as signed.
        const auto *const above = json.template get_ptr<const typename Json::number_unsigned_t *>();
        const auto *const below = json.template get_ptr<const typename Json::number_integer_t *>();
        if (above ? *above > static_cast<uint64_t>(most) : !below || *below < least || *below > most)
            throw NumberFault("expected a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
                              ", got " + json.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80));
        number = static_cast<Number>(above ? static_cast<int64_t>(*above) : *below);
    }

    template <typename Json>
    static void to_json(Json &json, Number number) {
        nlohmann::to_json(json, number);
    }
};

template <template <typename Key, typename Value, typename... More> class Map>
using JsonOf = nlohmann::basic_json<Map, std::vector, std::string, bool, int64_t, uint64_t, double, std::allocator, Conversion>;
using Json = JsonOf<std::map>;

// Reads a whole number of 64 bits that is no size: a time in nanoseconds, an inode (which wraps from 2^63 on).
inline int64_t wide_number(const Json &json) {
    if (!json.is_number_integer()) throw NumberFault("expected a whole number");
    return json.is_number_unsigned() ? static_cast<int64_t>(*json.get_ptr<const uint64_t *>()) : *json.get_ptr<const int64_t *>();
}

// Raises Json::exception for text that is not JSON, and PS_PAYLOAD for deeper JSON than penstock writes.
template <typename Tree = Json>
Tree parse_json(const std::string &text, const std::string &what) {
    return Tree::parse(text, [&](int depth, typename Tree::parse_event_t, Tree &) {
        if (depth > DEEPEST)
            throw Failure(PS_PAYLOAD, what + " has lists or objects nested in more than " + std::to_string(DEEPEST) +
                                          " others, which penstock does not write: export or compile again");
        return true;
    });
}

}  // namespace penstock
