#include "reads.h"

#include <algorithm>

#include "../aoti/package.h"
#include "../failure.h"
#include "../sparse/served.h"

namespace penstock {

namespace {

[[noreturn]] void refuse(const std::string &what) {
    throw Failure(PS_PAYLOAD, what + ": the plan and the program are not of one compilation; compile again");
}

const Json &entry_of(const Json &list, int32_t graph, const char *what) {
    const auto found = std::find_if(list.begin(), list.end(), [&](const Json &one) { return one.at("graph") == graph; });
    if (found == list.end()) refuse(std::string("there are no ") + what + " of graph " + std::to_string(graph));
    return *found;
}

// What the program computes for single experts is in its graph, which Python runs.
void refuse_computed(const Json &steps) {
    for (const Json &step : steps)
        for (const Json &one : step.value("sparse", Json::array()))
            if (!one.value("computed", Json()).is_null())
                throw Failure(PS_PLAN, "the program computes experts one at a time in " + step.at("name").get<std::string>() +
                                           ", which only Python does: compile it with --ladder, so that it computes all");
}

// The tensor that the operator of a read is given, whose slices are those of all units in one.
at::Tensor tensor_of(const Json &view, int64_t slices, char *storage) {
    auto shape = view.at("shape").get<std::vector<int64_t>>(), stride = view.at("stride").get<std::vector<int64_t>>();
    if (slices > 1) {
        if (shape.size() < 2 || shape[1] != slices || stride[0] != slices * stride[1]) refuse("units are no runs of slices");
        shape[1] *= shape[0];
        shape.erase(shape.begin()), stride.erase(stride.begin());
    }
    const at::TensorOptions options(scalar_type(view.at("dtype")));
    return at::from_blob(storage + view.at("offset").get<int64_t>(), shape, stride, options);
}

}  // namespace

std::map<int64_t, PooledRead> pooled_reads(const Json &payload, const Json &plan, int32_t graph, const ps_engine *engine) {
    std::map<int64_t, PooledRead> found;
    refuse_computed(entry_of(payload.at("traces"), graph, "steps").at("steps"));
    const Json pool = plan.value("pool", Json());
    if (pool.is_null()) return found;
    const Json &steps = entry_of(plan.at("traces"), graph, "steps").at("steps");
    const auto numbers = entry_of(payload.at("probes"), graph, "probe calls").value("units", std::vector<int64_t>());
    int32_t k = 0;
    for (const Json &step : steps) {
        for (const Json &one : step.value("sparse", Json::array())) {
            char *const storage = static_cast<char *>(ps_units_storage(engine, one.at("view").at("storage").get<int32_t>()));
            if (!storage || !serves(pool, one)) continue;
            const std::string name = step.at("name");
            if (one.value("tiles", false))
                throw Failure(PS_PLAN, "the plan computes " + name + " by tiles, whose bits only Python compares with those of "
                                       "the whole: make a plan without them");
            const auto number = std::find(numbers.begin(), numbers.end(), k);
            const int64_t slices = one.value("slices", int64_t{1});
            if (number == numbers.end()) refuse("step " + name + " reads by units, and no call of the program does");
            if (slices < 1) refuse("step " + name + " reads units of no slices");
            found[number - numbers.begin()] = {k, one.at("operator"), one.at("view").at("shape").at(0), slices,
                                               tensor_of(one.at("view"), slices, storage)};
        }
        ++k;
    }
    return found;
}

}  // namespace penstock
