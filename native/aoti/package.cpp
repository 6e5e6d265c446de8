#include "package.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/InferenceMode.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "../descriptor.h"
#include "../failure.h"
#include "by_units.h"

namespace penstock {

namespace {

constexpr int64_t SHARED_OUT = 1 << 17;  // elements for which torch uses several threads

// The version of the library in this process, which may have replaced the one whose headers are compiled in.
std::string loaded_torch() {
    const uint64_t version = aoti_torch_abi_version();
    return std::to_string(version >> 56) + "." + std::to_string(version >> 48 & 255) + "." + std::to_string(version >> 40 & 255);
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

// torch's loader takes a file, not bytes, and unpacks it into a folder of its own. A file in memory has no name that a
// killed process would leave.
std::unique_ptr<torch::inductor::AOTIModelPackageLoader> load_package(std::string_view bytes,
                                                                      const std::string &method) {
    const Descriptor file(memfd_create("compiled.pt2", MFD_CLOEXEC));
    if (file < 0 || !write_all(file, bytes))
        throw Failure(PS_STREAM, "the system refused " + std::to_string(bytes.size()) + " bytes of memory for compiled code (" +
                                     std::strerror(errno) + "): free some");
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    try {
        return std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, method, false, 1, -1);
    } catch (const std::exception &error) {
        const char *const folder = std::getenv("TMPDIR");
        const std::string text = error.what(), where = folder && *folder ? folder : "/tmp";
        throw Failure(PS_PAYLOAD, "torch cannot load the compiled code of " + method + ", which it unpacks in " + where + " (" +
                                      text.substr(0, text.find('\n')) + "): see that there is room or set TMPDIR, or compile "
                                      "it again");
    }
}

}  // namespace

at::ScalarType scalar_type(const std::string &name) {
    static const auto &types = *new std::map<std::string, at::ScalarType>{
        {"bool", at::kBool},       {"uint8", at::kByte},          {"int8", at::kChar},
        {"int16", at::kShort},     {"int32", at::kInt},           {"int64", at::kLong},
        {"uint16", at::kUInt16},   {"uint32", at::kUInt32},       {"uint64", at::kUInt64},
        {"float16", at::kHalf},    {"bfloat16", at::kBFloat16},   {"float32", at::kFloat},
        {"float64", at::kDouble},  {"complex64", at::kComplexFloat}, {"complex128", at::kComplexDouble},
        {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2},
        {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
    };
    const auto found = types.find(name);
    if (found == types.end()) throw Failure(PS_PAYLOAD, "tensors of " + name + " cannot be given to compiled code without Python");
    return found->second;
}

std::string name_of(at::ScalarType type) {
    for (const char *name : {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
                             "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn",
                             "float8_e5m2", "float8_e8m0fnu"})
        if (scalar_type(name) == type) return name;
    return at::toString(type);
}

void check_machine(const std::string &torch, const std::string &machine) {
    const std::string here = loaded_torch();
    const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
                              std::to_string(TORCH_VERSION_PATCH);
    if (here != built)
        throw Failure(PS_PLAN, "what runs compiled code was built for torch " + built + ", and torch " + here +
                                   " is loaded: build it for that");
    if (torch != here)
        throw Failure(PS_PAYLOAD, "the program was compiled by torch " + torch + ", and this is torch " + here +
                                      ": compile it again");
    std::istringstream words(machine);
    std::string device, system, processor, instructions;
    if (!(words >> device >> system >> processor)) return;
    utsname found;
    if (uname(&found) == 0 && processor != found.machine)
        throw Failure(PS_PAYLOAD, "the program was compiled for " + processor + ", and this is " + found.machine +
                                      ": compile it here");
    if (device != "cpu") throw Failure(PS_PLAN, "the program was compiled for " + device + ", and this runs on a CPU");
    while (words >> instructions)
        if (!has_instructions(instructions))
            throw Failure(PS_PAYLOAD, "the program was compiled for a processor with " + instructions +
                                          ", which this one lacks: compile it here, or there for less "
                                          "(ATEN_CPU_CAPABILITY=avx2)");
}

// A second OpenMP team, asleep until the end. Threads of a team spin for milliseconds between kernels, and take the
// processor from those that read weights; where there are more threads in teams than cores, libgomp has them spin for a
// moment only. Teams that compute keep their size, so results are the same.
class ParkedTeam {
  public:
    // One for all packages.
    static std::shared_ptr<ParkedTeam> shared() {
        // Never destroyed, as an application may destroy its programs after everything that is static here.
        static std::mutex &lock = *new std::mutex;
        static std::weak_ptr<ParkedTeam> &known = *new std::weak_ptr<ParkedTeam>;
        const std::lock_guard<std::mutex> guard(lock);
        auto team = known.lock();
        if (!team) known = team = std::make_shared<ParkedTeam>();
        return team;
    }

    ParkedTeam() {
        if (at::get_num_threads() == 1) return;
        thread_ = std::thread([this] {
            try {
                at::ones({SHARED_OUT}).add_(1);
            } catch (const std::exception &) {
                // Without memory there is no second team; what computes will say so.
            }
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

Package::Package(std::string_view bytes, const std::string &method) {
    register_operators();
    register_by_units();
    const c10::InferenceMode guard;
    loader_ = load_package(bytes, method);
    team_ = ParkedTeam::shared();
}

std::vector<std::string> Package::weights() const { return loader_->get_constant_fqns(); }

void Package::bind(std::unordered_map<std::string, at::Tensor> weights) {
    const c10::InferenceMode guard;
    weights_ = std::move(weights);
    loader_->load_constants(weights_, false, true, true);
}

std::vector<at::Tensor> Package::run(std::vector<at::Tensor> inputs, Probes &probes) {
    const c10::InferenceMode guard;
    try {
        return loader_->boxed_run(std::move(inputs));
    } catch (...) {
        if (probes.failure) std::rethrow_exception(std::exchange(probes.failure, nullptr));
        throw;
    }
}

}  // namespace penstock
