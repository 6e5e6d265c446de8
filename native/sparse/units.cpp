#include "units.h"

#include <algorithm>
#include <string>

#include "served.h"

namespace penstock {

namespace {

[[noreturn]] void refuse(const std::string &what) {
    throw Failure(PS_PAYLOAD, what + ": the payload and the plan do not belong together; plan it again");
}

// The bytes that an item takes of the dtypes whose names do not end with its bits.
int64_t item_nbytes(const std::string &dtype) {
    for (const char *const name : {"float8_", "float4_", "bits1x8", "bits2x4", "bits4x2", "quint4x2", "quint2x4"})
        if (dtype.rfind(name, 0) == 0) return 1;
    if (dtype == "bool") return 1;
    if (dtype == "bfloat16") return 2;
    const size_t digits = dtype.find_last_not_of("0123456789") + 1;
    if (digits == dtype.size()) return 0;
    const std::string kind = dtype.substr(0, digits), bits = dtype.substr(digits);
    const auto is_one_of = [](const std::string &one, std::initializer_list<const char *> some) {
        return std::find(some.begin(), some.end(), one) != some.end();
    };
    if (!is_one_of(kind, {"int", "uint", "float", "complex", "bcomplex", "bits", "qint", "quint"})) return 0;
    if (is_one_of(bits, {"1", "2", "3", "4", "5", "6", "7", "8"})) return 1;
    if (is_one_of(bits, {"16", "32", "64", "128"})) return std::stoi(bits) / 8;
    return 0;
}

UnitRead read_unit_read(const Json &json, const std::vector<Storage> &storages, const std::string &where) {
    const Json &view = json.at("view");
    const auto shape = view.at("shape").get<std::vector<int64_t>>();
    const auto stride = view.at("stride").get<std::vector<int64_t>>();
    const int64_t item = item_nbytes(view.at("dtype")), nbytes = storages[view.at("storage").get<size_t>()].nbytes;
    UnitRead read{view.at("storage"), shape.empty() ? 0 : shape[0], view.at("offset"), 0, 0,
                  json.at("route"), json.at("asked")};
    if (!item || shape.empty() || shape.size() != stride.size() || read.asked < 0) refuse(where + " reads units of no tensor");
    // Nothing that is multiplied here is larger than the storage, which is checked factor by factor.
    const auto reach = [&](size_t d) {
        const int64_t times = shape[d] - 1, step = stride[d];
        if (times < 0 || step < 0 || (times && step > nbytes / times)) refuse(where + " reads beyond its storage");
        return times * step;
    };
    int64_t last = 0;
    for (size_t d = 1; d < shape.size(); ++d)
        if ((last += reach(d)) > nbytes) refuse(where + " reads beyond its storage");
    if (reach(0) > nbytes || stride[0] > nbytes || read.offset < 0 || read.offset > nbytes)
        refuse(where + " reads beyond its storage");
    read.stride = stride[0] * item, read.nbytes = (last + 1) * item;
    if (read.offset + (read.count - 1) * read.stride + read.nbytes > nbytes) refuse(where + " reads beyond its storage");
    if (read.stride < read.nbytes) refuse(where + " reads units that overlap");
    return read;
}

// No two storages have bytes in one granule, and each has the phase of its file.
void check_places(const PoolPlan &pool, const std::vector<Storage> &storages) {
    std::vector<std::pair<int64_t, size_t>> placed;
    for (size_t s = 0; s < storages.size(); ++s) {
        const int64_t place = pool.layout[s];
        if (place < 0) continue;
        if (place % 64 != storages[s].phase || storages[s].produced)
            refuse("storage " + std::to_string(s) + " has no place in the pool, or another phase there");
        placed.emplace_back(place, s);
    }
    std::sort(placed.begin(), placed.end());
    int64_t end = 0;
    for (const auto &[place, s] : placed) {
        if (place / pool.granule < end) refuse("storage " + std::to_string(s) + " shares a granule of the pool with another");
        end = (place + storages[s].nbytes + pool.granule - 1) / pool.granule;
    }
}

void check_units(const PoolPlan &pool, const UnitRead &read, const std::string &where) {
    // Units lie in their granules in as many ways as a granule has bytes.
    for (int64_t number = 0; number < std::min(read.count, pool.granule); ++number) {
        const Granules some = pool.granules(read, number);
        if (some.stop - some.first > pool.nbytes / pool.granule)
            refuse(where + " reads units of which one does not fit into the pool");
    }
}

}  // namespace

PoolPlan read_pool(const Json &plan, const std::vector<Storage> &storages) {
    const Json &json = plan.at("pool");
    PoolPlan pool{json.at("nbytes"), json.at("granule"), 0, json.at("layout"), {}};
    if (pool.granule < 1 || pool.nbytes < 0 || pool.layout.size() != storages.size())
        refuse("the pool has no such shape");
    check_places(pool, storages);
    std::map<int, UnitRead> known;
    for (const Json &trace : plan.at("traces")) {
        UnitSteps method{trace.at("graph"), {}};
        int step = 0;
        for (const Json &one : trace.at("steps")) {
            const std::string where = "step " + std::to_string(step) + " of graph " + std::to_string(method.graph);
            for (const Json &some : one.value("sparse", Json::array())) {
                const int64_t s = some.at("view").at("storage");
                if (s < 0 || s >= static_cast<int64_t>(storages.size())) refuse(where + " reads units of no storage");
                if (pool.layout[s] < 0 || !serves(json, some)) continue;
                const UnitRead read = read_unit_read(some, storages, where);
                const auto [same, fresh] = known.emplace(read.storage, read);
                const UnitRead &first = same->second;
                if (fresh) check_units(pool, read, where), pool.units = add_size(pool.units, read.count);
                if (!method.reads.emplace(step, read).second) refuse(where + " reads units of two storages");
                if (read.count != first.count || read.offset != first.offset || read.stride != first.stride ||
                    read.nbytes != first.nbytes)
                    refuse(where + " reads other units of a storage than another step");
            }
            ++step;
        }
        pool.methods.push_back(std::move(method));
    }
    return pool;
}

}  // namespace penstock
