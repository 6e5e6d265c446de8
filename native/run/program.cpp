#include "program.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/InferenceMode.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <mutex>
#include <condition_variable>
#include <regex>
#include <sstream>
#include <thread>

#include "operators.h"

namespace penstock {

using Json = nlohmann::json;

namespace {

constexpr int PATIENCE_MS = 50;
constexpr int64_t SHARED_OUT = 1 << 17;  // elements for which torch uses several threads

at::ScalarType scalar_type(const std::string &name) {
    static const std::map<std::string, at::ScalarType> types{
        {"bool", at::kBool},       {"uint8", at::kByte},          {"int8", at::kChar},
        {"int16", at::kShort},     {"int32", at::kInt},           {"int64", at::kLong},
        {"uint16", at::kUInt16},   {"uint32", at::kUInt32},       {"uint64", at::kUInt64},
        {"float16", at::kHalf},    {"bfloat16", at::kBFloat16},   {"float32", at::kFloat},
        {"float64", at::kDouble},  {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble},
        {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
        {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
    };
    const auto found = types.find(name);
    if (found == types.end()) throw Failure(PS_PAYLOAD, "weights of " + name + " need Python: run it with penstock run");
    return found->second;
}

std::string name_of(at::ScalarType type) {
    for (const char *name : {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
                             "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn",
                             "float8_e5m2", "float8_e8m0fnu"})
        if (scalar_type(name) == type) return name;
    return at::toString(type);
}

bool has_instructions(const std::string &name) {
    const std::string level = at::get_cpu_capability();
    if (name == "AVX512") return level == "AVX512";
    if (name == "AVX2") return level == "AVX512" || level == "AVX2";
#ifdef __x86_64__
    if (name == "AVX512_VNNI") return __builtin_cpu_supports("avx512vnni");
    if (name == "AMX_TILE") return __builtin_cpu_supports("amx-tile");
#endif
    return name == "DEFAULT";
}

// The version of torch, and the processor, that the code was compiled for (docs/payload.md, "Program").
void check_machine(const Json &payload) {
    const std::string here = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
                             std::to_string(TORCH_VERSION_PATCH);
    if (payload.at("torch") != here)
        throw Failure(PS_PAYLOAD, "the program was compiled by torch " + payload.at("torch").get<std::string>() +
                                      ", and this is torch " + here + ": compile it again");
    std::istringstream machine(payload.at("program").value("machine", ""));
    std::string device, system, processor, instructions;
    if (!(machine >> device >> system >> processor)) return;
    utsname found;
    if (uname(&found) == 0 && processor != found.machine)
        throw Failure(PS_PAYLOAD, "the program was compiled for " + processor + ", and this is " + found.machine +
                                      ": compile it here");
    if (device != "cpu") throw Failure(PS_PLAN, "the program was compiled for " + device + ", and this runs on a CPU");
    while (machine >> instructions)
        if (!has_instructions(instructions))
            throw Failure(PS_PAYLOAD, "the program was compiled for a processor with " + instructions +
                                          ", which this one lacks: compile it here, or there for less "
                                          "(ATEN_CPU_CAPABILITY=avx2)");
}

// torch's loader takes a file, not bytes, and unpacks it into a folder of its own.
std::unique_ptr<torch::inductor::AOTIModelPackageLoader> load_package(const std::string &bytes,
                                                                      const std::string &method) {
    const char *const folder = std::getenv("TMPDIR");
    std::string path = std::string(folder && *folder ? folder : "/tmp") + "/penstock-run-XXXXXX.pt2";
    const int fd = mkstemps(path.data(), 4);
    if (fd < 0) throw Failure(PS_SOURCE, path + " could not be written (" + std::strerror(errno) + "): set TMPDIR");
    ::close(fd);
    struct Removed {
        const std::string &path;
        ~Removed() { unlink(path.c_str()); }
    } removed{path};
    std::ofstream file(path, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) throw Failure(PS_SOURCE, path + " could not be written: set TMPDIR to a folder with room");
    return std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, method, false, 1, -1);
}

// A second OpenMP team, asleep until the end. Threads of a team spin for milliseconds between kernels, and take the
// processor from those that read weights; where there are more threads in teams than cores, libgomp has them spin for a
// moment only. Teams that compute keep their size, so results are the same.
class ParkedTeam {
  public:
    ParkedTeam() {
        if (at::get_num_threads() == 1) return;
        thread_ = std::thread([this] {
            at::ones({SHARED_OUT}).add_(1);
            std::unique_lock<std::mutex> guard(lock_);
            parked_ = true;
            turned_.notify_all();
            turned_.wait(guard, [this] { return leave_; });
        });
        std::unique_lock<std::mutex> guard(lock_);
        turned_.wait(guard, [this] { return parked_; });
    }
    ~ParkedTeam() {
        {
            std::lock_guard<std::mutex> guard(lock_);
            leave_ = true;
        }
        turned_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

  private:
    std::mutex lock_;
    std::condition_variable turned_;
    bool parked_ = false, leave_ = false;
    std::thread thread_;
};

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

// The sizes of a method's symbols, as the inputs have them.
void check_sizes(const Json &input, const at::IntArrayRef sizes, const Json &symbols, bool only_examples,
                 std::map<std::string, int64_t> &seen) {
    const std::string name = input.at("name");
    const auto refuse = [&](const std::string &expected, size_t position, int64_t got) {
        throw Failure(PS_PLAN, "input " + name + ".shape[" + std::to_string(position) + "]: expected " + expected +
                                   ", got " + std::to_string(got) + "; pass what the program was exported for");
    };
    const Json &shape = input.value("shape", Json::array());
    if (shape.size() != sizes.size())
        throw Failure(PS_PLAN, "input " + name + ": expected " + std::to_string(shape.size()) + " dimensions, got " +
                                   std::to_string(sizes.size()) + "; pass what the program was exported for");
    for (size_t k = 0; k < sizes.size(); ++k) {
        if (shape[k].is_number()) {
            if (shape[k] != sizes[k]) refuse(shape[k].dump() + ", a static size", k, sizes[k]);
            continue;
        }
        for (const Json &symbol : symbols) {
            if (symbol.at("name") != shape[k]) continue;
            const int64_t example = symbol.at("example");
            if (only_examples && sizes[k] != example)
                refuse(std::to_string(example) + ", as exported: other sizes are checked in Python only", k, sizes[k]);
            if (sizes[k] < symbol.at("lower").get<int64_t>() ||
                (!symbol.at("upper").is_null() && sizes[k] > symbol.at("upper").get<double>()))
                refuse(symbol.at("lower").dump() + " to " + symbol.at("upper").dump(), k, sizes[k]);
            const auto [known, fresh] = seen.emplace(shape[k], sizes[k]);
            if (!fresh && known->second != sizes[k])
                refuse(std::to_string(known->second) + ", as in the other inputs", k, sizes[k]);
        }
    }
}

}  // namespace

struct StreamedProgram::State {
    Json method, signature, names;
    const volatile std::sig_atomic_t &interrupted;
    std::vector<at::Tensor> buffers;  // of storages outside of the arena
    std::unique_ptr<ps_engine, EngineCloser> engine;
    std::unordered_map<std::string, at::Tensor> weights;
    std::unique_ptr<torch::inductor::AOTIModelPackageLoader> package;  // destroyed before what it reads
    std::vector<at::Tensor> inputs, outputs;
    ParkedTeam team;

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
        char error[4096];
        for (size_t k; (k = next++) < outside.size() && !interrupted;) {
            void *const address = buffers[outside[k]].data_ptr();
            const ps_status status = ps_fetch(engine.get(), static_cast<int32_t>(outside[k]), address, error, sizeof error);
            const std::lock_guard<std::mutex> guard(lock);
            if (status != PS_OK) failure = {status, error};
        }
    };
    std::vector<std::thread> threads;
    for (int k = 1; k < readers; ++k) threads.emplace_back(read);
    read();
    for (std::thread &one : threads) one.join();
    if (failure) throw Failure(*failure);
    if (interrupted) throw Interrupted();
}

// Gives the compiled code its weights where they lie: it takes no copy and no reference.
void StreamedProgram::State::bind_weights(const Json &payload) {
    std::map<std::string, const Json *> parts;
    for (const Json &weight : payload.at("weights"))
        for (const Json &part : weight.at("parts")) {
            const std::string name = part.at("name");
            parts[weight.at("fqn").get<std::string>() + (name.empty() ? "" : "." + name)] = &part;
        }
    for (const std::string &name : package->get_constant_fqns()) {
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
    package->load_constants(weights, false, true, true);
}

StreamedProgram::StreamedProgram(const Artifact &artifact, const Json &plan, const RunOptions &options,
                                 const volatile std::sig_atomic_t &interrupted)
    : state_(std::make_unique<State>(interrupted)) {
    const c10::InferenceMode guard;
    const Json &payload = artifact.payload();
    check_machine(payload);
    state_->method = artifact.method(options.method);
    const std::string name = state_->method.at("name"), stored = artifact.program_file(name + ".json");
    const Json code = stored.empty() ? Json::object() : Json::parse(stored);
    if (!code.contains("outputs"))
        throw Failure(PS_PLAN, "method " + name + " has no form that can be called without Python: compile it again, or "
                               "run it with penstock run");
    state_->signature = code.at("signature"), state_->names = code.at("outputs");
    state_->open(artifact, plan, options);
    state_->read_outside(payload.at("storages"), plan, options.readers);
    state_->package = load_package(artifact.program_file("compiled.pt2"), name);
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
    Pass pass(state.engine.get(), state.method.at("graph"), state.interrupted);
    const auto began = std::chrono::steady_clock::now();
    const Silence silence;
    try {
        pass.begin();
        state.outputs = state.package->boxed_run(std::vector<at::Tensor>(state.inputs));
        pass.end();
    } catch (...) {
        ps_abort(state.engine.get());
        if (pass.was_interrupted) throw Interrupted();
        if (pass.failure) throw Failure(*pass.failure);
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
    ps_statistics found;
    ps_stats(state_->engine.get(), &found);
    return found;
}

}  // namespace penstock
