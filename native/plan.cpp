#include "plan.h"

#include <set>

#include "memory.h"
#include "sparse/served.h"

namespace penstock {

namespace {

[[noreturn]] void refuse(const std::string &what) {
    throw Failure(PS_PAYLOAD, what + ": the payload and the plan do not belong together; plan it again");
}

Json parse(const std::string &text, const char *what) {
    try {
        return parse_json(text, std::string("the ") + what);
    } catch (const Json::exception &) {
        throw Failure(PS_PAYLOAD, std::string("the ") + what + " is not JSON: compile again");
    }
}

Range read_range(const Json &json) {
    const Range range{json.at("start"), json.at("stop")};
    if (range.start < 0 || range.start >= range.stop)
        refuse("a range reaches from byte " + std::to_string(range.start) + " to " + std::to_string(range.stop));
    return range;
}

Ranges read_ranges(const Json &json) {
    Ranges ranges;
    for (const Json &one : json) ranges.push_back(read_range(one));
    return ranges;
}

bool intersects(const Ranges &ranges, Range item) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const Range &one) {
        return one.start < item.stop && item.start < one.stop;
    });
}

Queue queue_of(std::vector<Piece> pieces, int steps) {
    Queue queue{std::move(pieces), std::vector<int>(2 * steps + 1, 0)};
    for (Piece &piece : queue.pieces) {
        piece.mark = piece.step + (piece.out ? steps + 1 : 0);
        ++queue.counts[piece.mark];
    }
    return queue;
}

Storage read_storage(const Json &json, const std::vector<WeightFile> &files) {
    Storage storage{json.at("nbytes"), json.value("phase", int64_t{0}), {}, json.at("kind") == "produced", {}};
    if (storage.produced && !json.at("extents").empty()) refuse("a storage that is produced lies in a file");
    const auto sha256 = json.find("sha256");
    if (sha256 != json.end() && !sha256->is_null()) storage.sha256 = *sha256;
    if (storage.nbytes < 0) refuse("a storage has a negative size");
    if (storage.phase < 0 || storage.phase >= 64) refuse("a storage has a phase outside of 0 to 63");
    for (const Json &one : json.at("extents")) {
        const Extent extent{one.at("file"), one.at("file_offset"), one.at("storage_offset"), one.at("nbytes")};
        if (extent.file < 0 || extent.file >= static_cast<int>(files.size())) refuse("an extent names no file");
        const int64_t most = files[extent.file].nbytes;
        if (extent.nbytes < 0 || extent.file_offset < 0 || extent.nbytes > most ||
            extent.file_offset > most - extent.nbytes || extent.storage_offset < 0 ||
            extent.nbytes > storage.nbytes || extent.storage_offset > storage.nbytes - extent.nbytes)
            refuse("an extent lies outside its file or its storage");
        storage.extents.push_back(extent);
    }
    return storage;
}

int step_in(const Json &json, const char *name, int low, int high) {
    const int64_t step = json.at(name);
    if (step < low || step >= high) refuse("there is no step " + std::to_string(step));
    return static_cast<int>(step);
}

}  // namespace

const Method *Plan::method(int graph) const {
    for (const Method &one : methods)
        if (one.graph == graph) return &one;
    return nullptr;
}

Ranges Plan::cut(const Ranges &ranges) const {
    Ranges parts;
    for (const Range &whole : ranges)
        for (int64_t start = whole.start; start < whole.stop; start += piece)
            parts.push_back({start, std::min(start + piece, whole.stop)});
    return parts;
}

Range Plan::whole_granules(Range range) const {
    if (contiguous) return range;
    const auto behind = std::upper_bound(segments.begin(), segments.end(), range.start,
                                         [](int64_t at, const Range &one) { return at < one.start; });
    if (behind == segments.begin()) refuse("a storage lies before every segment");
    const Range &segment = *std::prev(behind);
    return {std::max(range.start / granule * granule, segment.start),
            std::min((range.stop + granule - 1) / granule * granule, segment.stop)};
}

Queue Plan::first_pass(const Method &method, bool resident_loaded) const {
    std::vector<Piece> pieces;
    const int n = method.steps();
    if (!resident_loaded)
        for (const Range &range : cut(resident)) pieces.push_back({range, n, -1});
    for (const Range &range : cut(subtract(method.boundary, merged(resident)))) {
        const auto first = std::find_if(method.probed.begin(), method.probed.end(),
                                        [&](int step) { return intersects(method.needs[step], range); });
        const int last = method.probed.empty() ? n : method.probed.back();  // waits for what only others read
        pieces.push_back({range, first == method.probed.end() ? last : *first, -1});
    }
    for (const Piece &piece : method.steady.pieces)
        if (piece.after >= 0) pieces.push_back(piece);
    return queue_of(std::move(pieces), n);
}

namespace {

// The steps of a trace that read something which leaves, or at which the schedule itself acts.
std::vector<int> probed_steps(const Json &steps, const std::set<int> &acting, const std::set<int> &leaving) {
    std::vector<int> probed;
    int step = 0;
    for (const Json &one : steps) {
        bool acts = acting.count(step) > 0;
        for (const char *const field : {"reads", "writes"})
            for (const Json &storage : one.value(field, Json::array()))
                acts = acts || leaving.count(storage.get<int>()) > 0;
        if (acts) probed.push_back(step);
        ++step;
    }
    return probed;
}

}  // namespace

// Refuses a range of which a byte lies in no segment: nothing may be brought there.
static void check_inside(const Plan &plan, const Ranges &ranges) {
    for (const Range &one : ranges) {
        const auto found = std::find_if(plan.segments.begin(), plan.segments.end(), [&](const Range &segment) {
            return segment.start <= one.start && one.stop <= segment.stop;
        });
        if (found == plan.segments.end())
            refuse("bytes " + std::to_string(one.start) + " to " + std::to_string(one.stop) +
                   " of the layout are in no segment");
    }
}

// Refuses segments that overlap, or of which two in a paged arena share a granule: one would drop bytes of the other.
static void check_segments(const Plan &plan) {
    int64_t reached = 0;
    for (const Range &one : plan.segments) {
        if (reached > (plan.contiguous ? one.start : round_down(one.start, plan.granule)))
            refuse("the segment from byte " + std::to_string(one.start) + " of the layout reaches into another");
        reached = one.stop;
    }
}

static void read_arena(Plan &plan, const Json &json) {
    const Json &arena = json.at("arena");
    plan.contiguous = arena.at("kind") == "contiguous";
    plan.mapped = arena.at("backing") == "mapped";
    plan.granule = arena.at("granule");
    plan.segments = read_ranges(arena.at("segments"));
    plan.layout = arena.at("layout").get<std::vector<int64_t>>();
    plan.arena_bytes = json.at("arena_bytes");
    plan.resident = read_ranges(json.at("resident"));
    const size_t count = plan.storages.size();
    if (plan.granule < 1 || plan.layout.size() != count || plan.arena_bytes < 0) refuse("the arena has no such shape");
    std::sort(plan.segments.begin(), plan.segments.end());
    check_segments(plan);
    check_inside(plan, plan.resident);
    plan.places = plan.contiguous ? json.at("addresses").get<std::vector<int64_t>>() : plan.layout;
    if (plan.places.size() != count) refuse("there is not one address for each storage");
    std::set<int64_t> outside;
    for (const Json &one : json.at("outside")) {
        const int64_t storage = one;
        if (storage < 0 || storage >= static_cast<int64_t>(count)) refuse("there is no storage outside the arena");
        if (!outside.insert(storage).second) refuse("storage " + std::to_string(storage) + " is outside the arena twice");
        plan.layout[storage] = plan.places[storage] = -1;
        plan.outside_bytes = add_size(plan.outside_bytes, plan.storages[storage].nbytes);
    }
    const int64_t end = plan.contiguous ? plan.arena_bytes : plan.segments.empty() ? 0 : plan.segments.back().stop;
    for (size_t s = 0; s < count; ++s) {
        const int64_t place = plan.places[s], nbytes = plan.storages[s].nbytes;
        if (place >= 0 && (place % 64 != plan.storages[s].phase || nbytes > end || place > end - nbytes))
            refuse("storage " + std::to_string(s) + " has no room in the arena, or another phase there");
        if (place < 0 || plan.layout[s] < 0)
            plan.layout[s] = plan.places[s] = -1;
        else if (nbytes)
            check_inside(plan, {{plan.layout[s], plan.layout[s] + nbytes}});
    }
}

// Gives what the program produces its place in the spill file: in the catalog's order, from granule to granule, or
// from page to page: no two share one.
static void place_produced(Plan &plan) {
    const int64_t unit = round_up(plan.granule, PAGE);
    int64_t end = 0;
    for (Storage &one : plan.storages) {
        if (!one.produced || !one.nbytes) continue;
        one.extents = {{static_cast<int>(plan.files.size()), end, 0, one.nbytes}};
        end = round_up(add_size(end, one.nbytes), unit);
    }
}

// Whether a method has a boundary of its own, in place of the plan's.
static bool has_boundary(const Json &schedule) {
    return schedule.contains("boundary") && !schedule.at("boundary").is_null();
}

// The bytes of the storages that a step reads, or writes, beside the resident ones.
static Ranges ranges_of(const Plan &plan, const Json &storages, const Ranges &resident) {
    Ranges needed;
    for (const Json &one : storages) {
        const int64_t s = one;
        if (s < 0 || s >= static_cast<int64_t>(plan.layout.size())) refuse("a step reads no storage");
        if (plan.layout[s] >= 0 && plan.storages[s].nbytes)
            needed.push_back(plan.whole_granules({plan.layout[s], plan.layout[s] + plan.storages[s].nbytes}));
    }
    return subtract(merged(needed), resident);
}

// Whether a step reads what the program produces in the arena, and no step of the same trace writes.
static bool continues(const Plan &plan, const Json &steps) {
    std::set<int> read, written;
    for (const Json &step : steps) {
        for (const Json &s : step.value("writes", Json::array())) written.insert(s.get<int>());
        for (const Json &s : step.at("reads"))
            if (plan.storages[s.get<int>()].produced && plan.layout[s.get<int>()] >= 0) read.insert(s.get<int>());
    }
    return !std::includes(written.begin(), written.end(), read.begin(), read.end());
}

// The bytes of all ranges that the plan brings or copies out, one after another.
static int64_t moved_nbytes(const Json &json) {
    int64_t sum = 0;
    const auto add = [&](const Json &ranges) {
        for (const Range &one : read_ranges(ranges)) sum = add_size(sum, one.nbytes());
    };
    add(json.at("resident"));
    add(json.at("boundary"));
    for (const Json &schedule : json.at("schedules")) {
        add(schedule.at("transfers"));
        if (has_boundary(schedule)) add(schedule.at("boundary"));
    }
    return sum;
}

static const Json &trace_of(const Json &traces, int graph) {
    const auto found =
        std::find_if(traces.begin(), traces.end(), [&](const Json &one) { return one.at("graph") == graph; });
    if (found == traces.end()) refuse("there is no trace of graph " + std::to_string(graph));
    return *found;
}

static int graph_before(const Json &trace) {
    const bool own = !trace.contains("follows") || trace.at("follows").is_null();
    return trace.at(own ? "graph" : "follows");
}

// The steps of a method that a transfer of the pass behind it waits for.
static std::set<int> waited_for(const Json &json, int graph, int steps) {
    std::set<int> found;
    for (const Json &schedule : json.at("schedules")) {
        if (graph_before(trace_of(json.at("traces"), schedule.at("graph"))) != graph) continue;
        for (const Json &transfer : schedule.at("transfers")) {
            const int64_t after = transfer.at("after");
            if (after < 0) found.insert(static_cast<int>(steps + after));
        }
    }
    return found;
}

static Method read_method(const Plan &plan, const Json &json, const Json &schedule, const Json &boundary) {
    Method method{};
    method.graph = schedule.at("graph");
    const Json &trace = trace_of(json.at("traces"), method.graph), &steps = trace.at("steps");
    method.before = graph_before(trace);
    const int n = static_cast<int>(steps.size());
    const int m = static_cast<int>(trace_of(json.at("traces"), method.before).at("steps").size());
    const Ranges resident = merged(plan.resident);
    std::set<int> acting = waited_for(json, method.graph, n), leaving;
    for (int s = 0; s < static_cast<int>(plan.layout.size()); ++s) {
        const int64_t start = plan.layout[s];
        if (start >= 0 && !subtract({{start, start + plan.storages[s].nbytes}}, resident).empty()) leaving.insert(s);
    }
    for (const Json &step : steps) {
        method.needs.push_back(ranges_of(plan, step.at("reads"), resident));
        method.takes.push_back(ranges_of(plan, step.value("writes", Json::array()), resident));
    }
    method.continues = continues(plan, steps);
    std::vector<Piece> pieces;
    method.boundary = read_ranges(boundary);
    check_inside(plan, method.boundary);
    method.crosses_calls = has_boundary(schedule);
    for (const Json &transfer : schedule.at("transfers")) {
        const int step = step_in(transfer, "step", 0, n);
        const int after = step_in(transfer, "after", method.before == method.graph ? step - n : -m, step);
        acting.insert(step);
        if (after >= 0) acting.insert(after);
        method.crosses_calls = method.crosses_calls || after < 0;
        const Ranges whole{read_range(transfer)};
        check_inside(plan, whole);
        const bool out = transfer.value("direction", "in") == "out";
        for (const Range &part : plan.cut(whole)) pieces.push_back({part, step, after, out});
    }
    method.steady = queue_of(std::move(pieces), n);
    method.drops.resize(n);
    for (const Json &drop : schedule.at("drops")) {
        const int step = step_in(drop, "step", 0, n);
        acting.insert(step);
        method.drops[step].push_back(read_range(drop));
        check_inside(plan, method.drops[step]);
    }
    method.probed = probed_steps(steps, acting, leaving);
    return method;
}

// Which probe calls enclose the steps at which the plan acts.
static void read_probes(Method &method, const Json &payload) {
    const Json none = Json::array(), orders = payload.value("probes", none);
    const auto order = std::find_if(orders.begin(), orders.end(),
                                    [&](const Json &one) { return one.at("graph") == method.graph; });
    for (const int step : method.probed) {
        int opens = 2 * step, closes = 2 * step + 1;
        if (order != orders.end()) {
            if (order->at("opens").size() != method.needs.size() || order->at("closes").size() != method.needs.size())
                refuse("there is not one probe call for each step");
            opens = order->at("opens")[step], closes = order->at("closes")[step];
        }
        method.opens[opens < 0 ? PS_PASS_BEGINS : opens] = step;
        method.closes[closes < 0 ? PS_PASS_ENDS : closes] = step;
    }
}

// The place of the method whose pass comes behind that of `graph`.
static size_t place_behind(const Plan &plan, int graph) {
    std::vector<size_t> found;
    for (size_t k = 0; k < plan.methods.size(); ++k)
        if (plan.methods[k].before == graph) found.push_back(k);
    if (found.size() != 1) refuse("not one method follows graph " + std::to_string(graph));
    return found.front();
}

Plan read_plan(const std::string &payload_text, const std::string &plan_text) {
    const Json payload = parse(payload_text, "payload"), json = parse(plan_text, "plan");
    try {
        Plan plan{};
        for (const Json &one : payload.at("files"))
            plan.files.push_back({one.at("path"), one.at("nbytes"), wide_number(one.at("mtime_ns")), wide_number(one.at("inode")),
                                  one.at("header_sha256"), one.at("sampled_sha256")});
        for (const Json &one : payload.at("storages")) plan.storages.push_back(read_storage(one, plan.files));
        plan.barrier = json.at("wrap") == "barrier";
        read_arena(plan, json);
        if (json.contains("pool") && !json.at("pool").is_null()) plan.pool = read_pool(json, plan.storages);
        place_produced(plan);
        plan.piece = std::max(std::max(PIECE, moved_nbytes(json) / MOST_PIECES) / plan.granule, int64_t{1}) * plan.granule;
        for (const Json &schedule : json.at("schedules")) {
            const Json &boundary = (has_boundary(schedule) ? schedule : json).at("boundary");
            plan.methods.push_back(read_method(plan, json, schedule, boundary));
            read_probes(plan.methods.back(), payload);
        }
        for (Method &one : plan.methods) one.following = place_behind(plan, one.graph);
        int64_t moved = 0, all = 0;
        for (const Method &one : plan.methods) {
            for (const Piece &piece : one.steady.pieces) {
                if (!piece.out) moved = add_size(moved, piece.range.nbytes());
                plan.spills = plan.spills || piece.out;
            }
            for (const Ranges &taken : one.takes) plan.keeps = plan.keeps || !taken.empty();
        }
        for (const Storage &one : plan.storages) all = add_size(all, one.nbytes);
        plan.repeated_bytes = std::min(moved, all);
        if (plan.methods.empty()) refuse("the plan has no schedule");
        return plan;
    } catch (const Json::exception &error) {
        throw Failure(PS_PAYLOAD, std::string("a field is missing or has another type (") + error.what() +
                                      "): compile and plan again");
    }
}

}  // namespace penstock
