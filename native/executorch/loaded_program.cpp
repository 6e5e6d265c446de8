#include "loaded_program.h"

#include <cstring>

#include "../failure.h"
#include "../json.h"
#include "../limits.h"
#include "../run/ladder.h"

namespace penstock {

using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::MethodMeta;
using executorch::runtime::Program;

namespace {

constexpr int PAYLOAD_VERSION = 12;
constexpr int64_t ALIGNMENT = 64;      // an address modulo this is a storage's phase
constexpr const char *CODE = "penstock.program.";

struct Registry {
    std::mutex lock;
    std::map<ProgramKey, std::weak_ptr<LoadedProgram>> loaded;
};

// It is never destroyed: an application may destroy its programs after everything that is static here.
Registry &registry() {
    static Registry &one = *new Registry;
    return one;
}

template <typename Value>
Value value_of(const BackendOption &option, const char *example) {
    const Value *const found = std::get_if<Value>(&option.value);
    if (!found)
        throw Failure(PS_PLAN, std::string("the load option \"") + option.key + "\" has another type: give " + example);
    return *found;
}

std::string text_of(const BackendOption &option, const char *example) {
    const auto text = value_of<std::array<char, executorch::runtime::kMaxOptionValueLength>>(option, example);
    return std::string(text.data(), strnlen(text.data(), text.size()));
}

int reader_count(int asked) {
    if (asked < 1) throw Failure(PS_PLAN, "the load option \"readers\" is " + std::to_string(asked) + ": give one thread or more");
    return asked;
}

Json read_payload(const NamedDataMap &map, const std::string &key) {
    const std::string title = "the program's " + key;
    Json payload = parse_json(copy_of(read_checked(map, key), title), title);
    const Json &version = payload.at("version");
    const bool known = version.is_number_integer() && version == PAYLOAD_VERSION;
    if (payload.at("format") != "penstock" || !known)
        throw Failure(PS_PAYLOAD, "the program's payload has version " + version.dump() +
                                      ", and this delegate reads version " +
                                      std::to_string(PAYLOAD_VERSION) + ": export it again");
    return payload;
}

// Zeros, aligned. Refuses a size that the system or a control group has no room for: it may grant memory and, once it is
// written, kill the process.
Memory make_memory(int64_t nbytes) {
    const int64_t available = available_bytes();
    if (nbytes < 0 || nbytes > LARGEST_SIZE || nbytes > available)
        throw Failure(PS_STREAM, "the program asks for " + std::to_string(nbytes) + " bytes of memory beside its arena, and " +
                                     std::to_string(available) + " are available: free some, or export it again");
    void *memory = nullptr;
    if (posix_memalign(&memory, ALIGNMENT, std::max<int64_t>(nbytes, 1)) != 0) throw std::bad_alloc();
    return Memory(static_cast<char *>(std::memset(memory, 0, nbytes)));
}

}  // namespace

LoadOptions::LoadOptions(Span<const BackendOption> given) {
    for (const BackendOption &option : given) {
        const std::string key = option.key;
        if (key == "budget")
            budget = text_of(option, "text, such as \"32MiB\"");
        else if (key == "weights")
            weights = text_of(option, "the path of the .ptd");
        else if (key == "readers")
            readers = reader_count(value_of<int>(option, "a number of threads"));
        else
            throw Failure(PS_PLAN, "there is no load option \"" + key + "\": give budget, weights or readers");
    }
}

void LoadOptions::refuse_others(const LoadOptions &others) const {
    const auto refuse_other = [](const char *option, const std::string &first, const std::string &other) {
        if (first != other)
            throw Failure(PS_PLAN, "a method of the program is loaded with the " + std::string(option) + " '" + first +
                                       "', and another one with '" + other + "': give all methods the same load options");
    };
    refuse_other("budget", budget, others.budget);
    refuse_other("weights", weights, others.weights);
    refuse_other("readers", std::to_string(readers), std::to_string(others.readers));
}

std::shared_ptr<LoadedProgram> LoadedProgram::of(const NamedDataMap &map, const std::string &payload, int64_t budget,
                                                 const LoadOptions &options) {
    if (!has_key(map, payload)) throw Failure(PS_PAYLOAD, "the program lacks its " + payload + ": export it again");
    const ProgramKey key{own_map(map, payload), payload};
    std::shared_ptr<LoadedProgram> found;  // outlives the guard: a last owner locks the registry, too
    std::lock_guard<std::mutex> guard(registry().lock);
    const auto known = registry().loaded.find(key);
    if (known != registry().loaded.end()) found = known->second.lock();
    if (found) {
        found->options_.refuse_others(options);
    } else {
        found = std::make_shared<LoadedProgram>(map, key, budget, options);
        registry().loaded[key] = found;
    }
    return found;
}

// Others may have loaded the program again since its last delegate has gone.
LoadedProgram::~LoadedProgram() {
    std::lock_guard<std::mutex> guard(registry().lock);
    const auto known = registry().loaded.find(key_);
    if (known != registry().loaded.end() && known->second.expired()) registry().loaded.erase(known);
}

std::vector<std::shared_ptr<LoadedProgram>> LoadedProgram::all() {
    std::vector<std::shared_ptr<LoadedProgram>> found;
    std::lock_guard<std::mutex> guard(registry().lock);
    found.reserve(registry().loaded.size());
    for (const auto &[key, one] : registry().loaded)
        if (auto loaded = one.lock()) found.push_back(std::move(loaded));
    return found;
}

// Raises PS_PLAN for a program whose weights have no values, as a fake export leaves them.
static void refuse_empty(const Json &storages) {
    for (const Json &one : storages)
        if (one.at("kind") != "mutable" && one.at("nbytes") != 0 && one.at("extents").empty())
            throw Failure(PS_PLAN, "the program was exported without the values of its weights: it can be read and planned, "
                                   "not run; export the model with its weights");
}

LoadedProgram::LoadedProgram(const NamedDataMap &map, ProgramKey key, int64_t budget, const LoadOptions &options)
    : key_(std::move(key)), options_(options) {
    const Json payload = read_payload(map, key_.second);
    refuse_empty(payload.at("storages"));
    if (!options.budget.empty()) budget = parse_size(options.budget, weight_nbytes(payload));
    const Json &plan =
        find_plan(payload, budget < 0 ? INT64_MAX : budget, "the program", "export it again");
    plan_budget_ = plan.at("budget");
    if (!plan.value("pool", Json()).is_null())
        throw Failure(PS_PLAN, "the plan of " + std::to_string(plan_budget_) + " bytes of the program has a pool, and nothing "
                               "here brings the units that a call asks for: export it again");
    catalog_.emplace(payload, plan);
    torch_ = payload.at("torch");
    if (!payload.at("program").is_null()) machine_ = payload.at("program").value("machine", "");
    weights_ = std::make_unique<NamedWeights>(map, options.weights, payload.at("files"));
    open(weights_->placed(payload), plan, options);
    fill_outside(plan, payload.at("storages"));
    reserve_scratch(map);
}

void LoadedProgram::open(const Json &payload, const Json &plan, const LoadOptions &options) {
    ps_options how{};
    how.readers = options.readers;
    if (weights_->opened().empty()) {
        how.read = NamedWeights::read;
        how.context = weights_.get();
    } else {
        how.opened = weights_->opened().data();
    }
    char error[4096];
    ps_engine *opened = nullptr;
    const ps_status status =
        ps_open(payload.dump().c_str(), plan.dump().c_str(), "", &how, &opened, error, sizeof error);
    if (status != PS_OK) throw Failure(status, error);
    engine_.reset(opened);
}

// Has what the plan keeps outside of the arena in memory; a state without values begins as zeros.
void LoadedProgram::fill_outside(const Json &plan, const Json &storages) {
    for (const Json &one : plan.at("outside")) {
        const int storage = one;
        const int64_t nbytes = catalog_->nbytes(storage), phase = storages.at(storage).value("phase", int64_t{0});
        Memory memory = make_memory(phase + nbytes);
        char *const address = memory.get() + phase;
        outside_[storage] = {std::move(memory), address};
        outside_bytes_ = add_size(outside_bytes_, phase + nbytes);
        char error[4096];
        const ps_status status = ps_fetch(engine_.get(), storage, address, error, sizeof error);
        if (status != PS_OK) throw Failure(status, error);
    }
}

LoadedProgram::Code::Code(const NamedDataMap &map, const std::string &key)
    : bytes(read_checked(map, key)), loader(bytes.data(), bytes.size()) {
    Result<Program> found = Program::load(&loader);
    if (!found.ok()) throw Failure(PS_PAYLOAD, "the program's " + key + " cannot be loaded: export it again");
    program = std::make_unique<Program>(std::move(found.get()));
}

const Program &LoadedProgram::code(const NamedDataMap &map, const std::string &key) {
    auto &code = codes_[key];
    if (!code) code = std::make_unique<Code>(map, key);
    return *code->program;
}

// Has memory for the intermediate values of the region that needs most, before any region takes addresses in it.
void LoadedProgram::reserve_scratch(const NamedDataMap &map) {
    std::vector<int64_t> most;
    for (uint32_t k = 0; k < map.get_num_keys().get(); ++k) {
        const std::string key = map.get_key(k).get();
        if (key.rfind(CODE, 0) != 0) continue;
        const Program &program = code(map, key);
        for (size_t m = 0; m < program.num_methods(); ++m) {
            const Result<MethodMeta> meta = program.method_meta(program.get_method_name(m).get());
            if (!meta.ok()) throw Failure(PS_PAYLOAD, "the program's " + key + " is malformed: export it again");
            if (most.size() < meta->num_memory_planned_buffers()) most.resize(meta->num_memory_planned_buffers());
            for (size_t b = 0; b < meta->num_memory_planned_buffers(); ++b)
                most[b] = std::max(most[b], meta->memory_planned_buffer_size(b).get());
        }
    }
    for (const int64_t nbytes : most) {
        scratch_memory_.push_back(make_memory(nbytes));
        scratch_spans_.emplace_back(reinterpret_cast<uint8_t *>(scratch_memory_.back().get()), nbytes);
    }
    scratch_ = HierarchicalAllocator({scratch_spans_.data(), scratch_spans_.size()});
}

char *LoadedProgram::address(int storage) const {
    const auto outside = outside_.find(storage);
    return outside != outside_.end() ? outside->second.second
                                     : static_cast<char *>(ps_storage(engine_.get(), storage));
}

void LoadedProgram::check(ps_status status) const {
    if (status != PS_OK) throw Failure(status, ps_error(engine_.get()));
}

// Where a pass was left in the middle, the engine starts over, and loads what this region needs on demand.
void LoadedProgram::enter(int graph, int region, int step) {
    if (region == 0 || graph != graph_) {
        graph_ = -1;
        check(ps_begin(engine_.get(), graph));
        graph_ = graph;
        check(ps_probe(engine_.get(), graph, PS_PASS_BEGINS));
    }
    if (step >= 0) check(ps_probe(engine_.get(), graph, 2 * step));
}

void LoadedProgram::leave(int graph, int step, bool last) {
    if (step >= 0) check(ps_probe(engine_.get(), graph, 2 * step + 1));
    if (!last) return;
    graph_ = -1;
    check(ps_probe(engine_.get(), graph, PS_PASS_ENDS));
    check(ps_end(engine_.get(), graph));
}

void LoadedProgram::abort() {
    graph_ = -1;
    ps_abort(engine_.get());
}

ps_statistics LoadedProgram::statistics() const {
    ps_statistics found;
    ps_stats(engine_.get(), &found);
    found.held_bytes += outside_bytes_;
    found.peak_bytes += outside_bytes_;
    return found;
}

}  // namespace penstock
