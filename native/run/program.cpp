#include "program.h"

#include <c10/core/InferenceMode.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
#include <mutex>
#include <regex>
#include <thread>

#include "../aoti/package.h"
#include "pass.h"
#include "reads.h"
#include "sizes.h"

namespace penstock {

namespace {

constexpr int PATIENCE_MS = 50;

// Compiled code writes a line of its own to std::cerr where a call in it fails. What failed is said once, at the end.
class Silence {
  public:
    Silence() : before_(std::cerr.rdbuf(nullptr)) {}
    ~Silence() { std::cerr.rdbuf(before_); }

  private:
    std::streambuf *const before_;
};

struct EngineCloser {
    void operator()(ps_engine *engine) const { ps_close(engine); }
};

}  // namespace

struct StreamedProgram::State {
    Json method, signature, names;
    const volatile std::sig_atomic_t &interrupted;
    std::vector<at::Tensor> buffers;  // of storages outside of the arena
    std::unique_ptr<ps_engine, EngineCloser> engine;
    std::unique_ptr<Package> package;  // destroyed before what it reads
    std::map<int64_t, PooledRead> reads;  // by units, by their numbers
    std::vector<at::Tensor> inputs, outputs;

    explicit State(const volatile std::sig_atomic_t &flag) : interrupted(flag) {}

    void open(const Artifact &artifact, const Json &plan, const RunOptions &options);
    void read_outside(const Json &storages, const Json &plan, int readers);
    void bind_weights(const Json &payload);
};

void StreamedProgram::State::open(const Artifact &artifact, const Json &plan, const RunOptions &options) {
    ps_options how{};
    how.readers = options.readers;
    how.buffered = options.buffered;
    how.patience_ms = PATIENCE_MS;
    char error[4096];
    ps_engine *opened = nullptr;
    const ps_status status = ps_open(artifact.text().c_str(), plan.dump().c_str(), artifact.folder().c_str(), &how,
                                     &opened, error, sizeof error);
    if (status != PS_OK) throw Failure(status, error);
    engine.reset(opened);
    if (ps_probed(opened, method.at("graph"), nullptr, 0) < 0)
        throw Failure(PS_PAYLOAD, "the plan has no schedule for method " + method.at("name").get<std::string>());
}

// Has what the plan keeps outside of the arena in memory, read by several threads.
void StreamedProgram::State::read_outside(const Json &storages, const Json &plan, int readers) {
    buffers.resize(storages.size());
    const auto outside = plan.at("outside").get<std::vector<size_t>>();
    for (const size_t s : outside)
        buffers.at(s) = at::empty({storages[s].at("nbytes").get<int64_t>()}, at::TensorOptions(at::kByte));
    std::atomic<size_t> next{0};
    std::mutex lock;
    std::optional<Sentence> failure;
    const auto read = [&] {
        try {
            char error[4096];
            for (size_t k; (k = next++) < outside.size() && !interrupted;) {
                void *const address = buffers[outside[k]].data_ptr();
                const ps_status status = ps_fetch(engine.get(), static_cast<int32_t>(outside[k]), address, error, sizeof error);
                if (status != PS_OK) throw Failure(status, error);
            }
        } catch (...) {
            const std::lock_guard<std::mutex> guard(lock);
            failure = caught();
        }
    };
    std::vector<std::thread> threads;
    try {
        for (int k = 1; k < readers; ++k) threads.emplace_back(read);
    } catch (const std::exception &) {
        // This thread reads what others would have read.
    }
    read();
    for (std::thread &one : threads) one.join();
    if (failure) throw Failure(*failure);
    if (interrupted) throw Interrupted();
}

// Gives the compiled code its weights where they lie.
void StreamedProgram::State::bind_weights(const Json &payload) {
    std::map<std::string, const Json *> parts;
    for (const Json &weight : payload.at("weights"))
        for (const Json &part : weight.at("parts")) {
            const std::string name = part.at("name");
            parts[weight.at("fqn").get<std::string>() + (name.empty() ? "" : "." + name)] = &part;
        }
    std::unordered_map<std::string, at::Tensor> weights;
    for (const std::string &name : package->weights()) {
        const auto found = parts.find(name);
        if (found == parts.end())
            throw Failure(PS_PAYLOAD, "the compiled code reads a weight " + name + " that the payload lacks: compile again");
        const Json &part = *found->second;
        const auto shape = part.at("shape").get<std::vector<int64_t>>(), stride = part.at("stride").get<std::vector<int64_t>>();
        const at::ScalarType dtype = scalar_type(part.at("dtype"));
        const int64_t s = part.at("storage"), offset = part.at("offset");
        const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
        char *address = static_cast<char *>(ps_storage(engine.get(), static_cast<int32_t>(s)));
        if (buffers.at(s).defined()) address = static_cast<char *>(buffers[s].data_ptr());
        // What no step reads gets a place that is never touched.
        weights[name] = address && !empty ? at::from_blob(address + offset, shape, stride, at::TensorOptions(dtype))
                                          : at::empty_strided(shape, stride, at::TensorOptions(dtype));
    }
    package->bind(std::move(weights));
}

StreamedProgram::StreamedProgram(const Artifact &artifact, const Json &plan, const RunOptions &options,
                                 const volatile std::sig_atomic_t &interrupted)
    : state_(std::make_unique<State>(interrupted)) {
    const c10::InferenceMode guard;
    const Json &payload = artifact.payload();
    check_machine(payload.at("torch"), payload.at("program").value("machine", ""));
    state_->method = artifact.method(options.method);
    const std::string name = state_->method.at("name");
    const std::string_view stored = artifact.program_file(name + ".json");
    const Json code = stored.empty() ? Json::object() : Json::parse(stored);
    if (!code.contains("outputs"))
        throw Failure(PS_PLAN, "method " + name + " has no form that can be called without Python: compile it again, or "
                               "run it with penstock run");
    state_->signature = code.at("signature"), state_->names = code.at("outputs");
    state_->open(artifact, plan, options);
    state_->reads = pooled_reads(payload, plan, state_->method.at("graph"), state_->engine.get());
    state_->read_outside(payload.at("storages"), plan, options.readers);
    state_->package = std::make_unique<Package>(artifact.program_file("compiled.pt2"), name);
    state_->bind_weights(payload);
}

StreamedProgram::~StreamedProgram() = default;

void StreamedProgram::bind(const std::vector<NamedTensor> &inputs) {
    State &state = *state_;
    const Json symbols = state.method.value("symbols", Json::array());
    bool only_examples = !state.signature.at("guards").at("tuple").empty();
    for (const Json &symbol : symbols)
        only_examples |= !std::regex_match(symbol.at("name").get<std::string>(), std::regex("[\\w.]+(\\[\\d+\\])?"));
    std::map<std::string, int64_t> seen;
    std::string names;
    size_t used = 0;
    state.inputs.clear();
    for (const Json &input : state.method.at("inputs")) {
        if (!input.value("value", Json()).is_null()) continue;  // export has made it constant
        const std::string name = input.at("name"), dtype = input.at("dtype");
        names += (names.empty() ? "" : ", ") + name;
        const auto found = std::find_if(inputs.begin(), inputs.end(), [&](const NamedTensor &one) { return one.name == name; });
        if (dtype == "int" || dtype == "float")
            throw Failure(PS_PLAN, "input " + name + " is a number, which cannot be given here: run it with penstock run");
        if (found == inputs.end()) throw Failure(PS_PLAN, "the inputs lack the tensor " + name);
        ++used;
        if (found->dtype != dtype)
            throw Failure(PS_PLAN, "input " + name + ": expected " + dtype + ", got " + found->dtype +
                                       "; pass what the program was exported for");
        const at::Tensor tensor = at::empty(found->shape, at::TensorOptions(scalar_type(dtype)));
        std::memcpy(tensor.data_ptr(), found->bytes.data(), found->bytes.size());
        check_sizes(input, tensor.sizes(), symbols, only_examples, seen);
        state.inputs.push_back(tensor);
    }
    if (used != inputs.size()) throw Failure(PS_PLAN, "the inputs must be " + names + " and nothing else");
}

double StreamedProgram::run() {
    State &state = *state_;
    const c10::InferenceMode guard;
    Pass pass(state.engine.get(), state.method.at("graph"), state.reads, state.interrupted);
    const auto began = std::chrono::steady_clock::now();
    const Silence silence;
    try {
        pass.begin();
        state.outputs = state.package->run(state.inputs, pass);
        pass.end();
    } catch (...) {
        ps_abort(state.engine.get());
        throw;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

std::vector<NamedTensor> StreamedProgram::outputs() const {
    if (state_->names.size() > state_->outputs.size())
        throw Failure(PS_PAYLOAD, "the compiled code gave fewer outputs than the method has: compile again");
    std::vector<NamedTensor> named;
    for (size_t k = 0; k < state_->names.size(); ++k) {
        const at::Tensor dense = state_->outputs[k].contiguous();
        named.push_back({state_->names[k], name_of(dense.scalar_type()), dense.sizes().vec(),
                         std::string(static_cast<const char *>(dense.const_data_ptr()), dense.nbytes())});
    }
    return named;
}

ps_statistics StreamedProgram::statistics() const {
    ps_statistics found, units;
    ps_stats(state_->engine.get(), &found);
    ps_units_stats(state_->engine.get(), &units);
    found.bytes_moved += units.bytes_moved, found.bytes_read += units.bytes_read, found.stall_ns += units.stall_ns;
    found.held_bytes += units.held_bytes, found.peak_bytes += units.peak_bytes;
    return found;
}

}  // namespace penstock
