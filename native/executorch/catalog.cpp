#include "catalog.h"

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>

#include <algorithm>
#include <array>

#include "../failure.h"

namespace penstock {

ScalarType scalar_type(const std::string &dtype) {
    static const std::map<std::string, ScalarType> types{
        {"bool", ScalarType::Bool},   {"uint8", ScalarType::Byte},     {"int8", ScalarType::Char},
        {"int16", ScalarType::Short}, {"int32", ScalarType::Int},      {"int64", ScalarType::Long},
        {"float16", ScalarType::Half}, {"bfloat16", ScalarType::BFloat16}, {"float32", ScalarType::Float},
        {"float64", ScalarType::Double}, {"uint16", ScalarType::UInt16}, {"uint32", ScalarType::UInt32},
        {"uint64", ScalarType::UInt64},
    };
    const auto found = types.find(dtype);
    if (found == types.end())
        throw Failure(PS_PLAN, "this runtime has no tensors of " + dtype + ": keep the weight out of the regions");
    return found->second;
}

namespace {

using Numbers = std::vector<int64_t>;

[[noreturn]] void refuse(const Json &region, const std::string &field, const std::string &expected, const Json &got) {
    throw Failure(PS_PAYLOAD, "region " + region.at("region").dump() + " of graph " + region.at("graph").dump() + ": $." + field +
                                  ": expected " + expected + ", got " + got.dump().substr(0, 80) + "; export it again");
}

// Tells whether a tensor whose dimensions lie in memory in this order is a permutation of them.
bool is_order(Numbers order, size_t dimensions) {
    std::sort(order.begin(), order.end());
    for (size_t k = 0; k < order.size(); ++k)
        if (order[k] != static_cast<int64_t>(k)) return false;
    return order.size() == dimensions;
}

bool fits(const Numbers &shape, int64_t offset, int64_t nbytes, int64_t room) {
    bool empty = false;
    if (shape.size() > executorch::runtime::kTensorDimensionLimit) return false;
    for (const int64_t size : shape) {
        empty = empty || !size;  // the strides of a tensor without items count the other sizes
        if (size < 0 || size > INT32_MAX || __builtin_mul_overflow(nbytes, std::max<int64_t>(size, 1), &nbytes)) return false;
    }
    return offset >= 0 && offset <= room && nbytes <= (empty ? LARGEST_SIZE : room - offset);
}

// Tells whether a part has the strides of a dense tensor with dimensions in this order.
bool has_order(const Json &part, const Numbers &shape, const Numbers &order) {
    const auto stride = part.at("stride").get<Numbers>();
    if (std::count(shape.begin(), shape.end(), 0)) return true;
    int64_t dense = 1;
    for (size_t k = order.size(); k-- > 0; dense *= shape[order[k]])
        if (shape[order[k]] > 1 && stride.at(order[k]) != dense) return false;
    return true;
}

}  // namespace

Catalog::Catalog(const Json &payload, const Json &plan) {
    for (const Json &one : payload.at("storages"))
        storages_.push_back({one.at("nbytes"), one.at("kind") == "mutable", false});
    for (const Json &one : plan.at("outside")) {
        const auto storage = one.get<size_t>();
        if (storage >= storages_.size()) throw Failure(PS_PAYLOAD, "the plan keeps a storage in memory that there is not: export it again");
        storages_[storage].outside = true;
    }
    for (const Json &trace : plan.at("traces")) {
        auto &steps = reads_[trace.at("graph")];
        for (const Json &step : trace.at("steps")) steps.push_back(step.at("reads").get<std::set<int64_t>>());
    }
    for (const Json &weight : payload.at("weights"))
        for (const Json &part : weight.at("parts")) {
            const std::string name = part.at("name");
            parts_[weight.at("fqn").get<std::string>() + (name.empty() ? "" : "." + name)] = part;
        }
}

void Catalog::check(const Json &region) const {
    const auto steps = reads_.find(region.at("graph").get<int64_t>());
    if (steps == reads_.end()) refuse(region, "graph", "that of a method", region.at("graph"));
    const auto [first, behind] = region.at("steps").get<std::array<int64_t, 2>>();
    const auto count = static_cast<int64_t>(steps->second.size()), most = region.at("kernels") == "executorch" ? 1 : count;
    if (first < 0 || behind < first || behind > count || behind - first > most)
        refuse(region, "steps", "one of " + std::to_string(count) + " steps, or none", region.at("steps"));
    const size_t taken = region.at("kernels") == "aotinductor" ? region.at("inputs").get<size_t>() : 0;
    if (region.at("takes").size() != taken) refuse(region, "takes", std::to_string(taken) + " inputs", region.at("takes"));
    for (size_t k = 0; k < region.at("appended").size(); ++k) check_appended(region, k);
}

bool Catalog::brings(const Json &region, int64_t storage) const {
    const auto [first, behind] = region.at("steps").get<std::array<int64_t, 2>>();
    const auto &steps = reads_.at(region.at("graph").get<int64_t>());
    return storages_.at(storage).outside || std::any_of(steps.begin() + first, steps.begin() + behind,
                                                        [&](const auto &reads) { return reads.count(storage) > 0; });
}

void Catalog::check_appended(const Json &region, size_t index) const {
    const Json &one = region.at("appended")[index];
    const auto fail = [&](const std::string &field, const std::string &expected) {
        refuse(region, "appended[" + std::to_string(index) + "]." + field, expected, one.at(field));
    };
    const int64_t storage = one.at("storage"), offset = one.at("offset");
    if (storage < 0 || storage >= static_cast<int64_t>(storages_.size()))
        fail("storage", "one of " + std::to_string(storages_.size()) + " storages");
    const Storage &facts = storages_[storage];
    // Compiled code may ask for what it does not read.
    if (region.at("kernels") == "executorch" && !brings(region, storage))
        fail("storage", "one that $.steps read, or that stays in memory");
    if (one.at("mutable").get<bool>() && !(facts.state && facts.outside)) fail("mutable", "false, as the storage is no state");
    const auto shape = one.at("shape").get<Numbers>(), order = one.at("dim_order").get<Numbers>();
    const auto item = static_cast<int64_t>(executorch::runtime::elementSize(scalar_type(one.at("dtype"))));
    if (!is_order(order, shape.size())) fail("dim_order", "each dimension of $.shape once");
    if (!fits(shape, offset, item, facts.nbytes))
        fail("shape", "a tensor inside of its " + std::to_string(facts.nbytes) + " bytes");
    const std::string name = one.at("name");
    const auto part = parts_.find(name);
    if (part == parts_.end()) return;
    for (const char *field : {"storage", "offset", "dtype", "shape"})
        if (part->second.at(field) != one.at(field)) fail(field, part->second.at(field).dump() + ", as " + name + " has in the payload");
    if (!has_order(part->second, shape, order)) fail("dim_order", "that of " + name + " in the payload");
}

}  // namespace penstock
