// Runs ExecuTorch programs as an application would, and says what happened as JSON.
//   run_pte REQUEST.json
// The request: `libraries` to load first; `programs`, each {pte, data: [FILES], mode: "mmap" | "mlock" | "file" | "memory",
// share, options}, where `share` has methods share the memory of buffers;
// `calls` in order, each {program, method, inputs: FILE, outputs: FILE} or {program, unload: METHOD or true} or
// {program, shell: COMMAND} or {program, method, reload: TIMES}; `options` of a call replace those of its program. With
// `threads`, the calls of each program run in a thread of its own; with `late`, programs are destroyed after all that the
// libraries have that is static. The answer has, for each call, ExecuTorch's `error`, the
// most memory that the process has taken, what its heap takes now, and the delegate's figures.

#include <dlfcn.h>
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <malloc.h>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "../../../../native/executorch/names.h"
#include "../../../../native/run/safetensors.h"

using namespace penstock;
using executorch::extension::Module;
using executorch::extension::TensorPtr;

namespace {

constexpr const char *BACKEND = "PenstockBackend";
const std::vector<std::pair<std::string, ScalarType>> TYPES{{"float32", ScalarType::Float}, {"int64", ScalarType::Long}};

BackendOption make_option(const std::string &key, const Json &value) {
    BackendOption option;
    key.copy(option.key, sizeof option.key - 1);
    if (value.is_number()) {
        option.value = value.get<int>();
    } else {
        std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
        value.get<std::string>().copy(text.data(), text.size() - 1);
        option.value = text;
    }
    return option;
}

// A file in memory, once however many programs are made of it.
const std::string &in_memory(const std::string &path) {
    static auto &files = *new std::map<std::string, std::string>;
    static std::mutex lock;
    const std::lock_guard<std::mutex> guard(lock);
    if (!files.count(path)) files[path] = penstock::read_file(path);
    return files[path];
}

struct Program {
    std::unique_ptr<Module> module;
    std::vector<BackendOption> options;

    explicit Program(const Json &asked) {
        const auto data = asked.at("data").get<std::vector<std::string>>();
        const std::string mode = asked.at("mode");
        if (mode == "memory") {
            const auto loader = [](const std::string &path) {
                const std::string &bytes = in_memory(path);
                return std::make_unique<executorch::extension::BufferDataLoader>(bytes.data(), bytes.size());
            };
            module = std::make_unique<Module>(loader(asked.at("pte")), nullptr, nullptr, nullptr, loader(data.at(0)));
        } else {
            const auto how = mode == "mmap"    ? Module::LoadMode::Mmap
                             : mode == "mlock" ? Module::LoadMode::MmapUseMlockIgnoreErrors
                                               : Module::LoadMode::File;
            module = std::make_unique<Module>(asked.at("pte").get<std::string>(), data, how, nullptr, nullptr, nullptr,
                                              asked.at("share").get<bool>());
        }
        for (const auto &[key, value] : asked.at("options").items()) options.push_back(make_option(key, value));
    }

    Error load(const std::string &method, const Json &changed) {
        if (!changed.empty()) options.clear();
        for (const auto &[key, value] : changed.items()) options.push_back(make_option(key, value));
        executorch::runtime::LoadBackendOptionsMap map;
        if (!options.empty()) (void)map.set_options(BACKEND, {options.data(), options.size()});
        const Error error = module->is_loaded() && changed.empty() ? Error::Ok : module->load(map);
        return error == Error::Ok ? module->load_method(method) : error;
    }
};

Error call(Program &program, const Json &asked) {
    const std::string method = asked.at("method");
    if (const Error error = program.load(method, asked.value("options", Json::object())); error != Error::Ok) return error;
    std::vector<NamedTensor> given = penstock::read_tensors(asked.at("inputs"));
    std::sort(given.begin(), given.end(), [](const auto &one, const auto &other) { return one.name < other.name; });
    std::vector<TensorPtr> tensors;
    std::vector<EValue> inputs;
    for (NamedTensor &one : given) {
        const auto type = std::find_if(TYPES.begin(), TYPES.end(), [&](auto &known) { return known.first == one.dtype; });
        std::vector<int32_t> sizes(one.shape.begin(), one.shape.end());
        tensors.push_back(executorch::extension::from_blob(one.bytes.data(), sizes, type->second));
        inputs.emplace_back(*tensors.back());
    }
    const auto outputs = program.module->execute(method, inputs);
    if (!outputs.ok()) return outputs.error();
    std::vector<NamedTensor> made;
    for (const EValue &one : *outputs) {
        const auto &tensor = one.toTensor();
        const auto type = std::find_if(TYPES.begin(), TYPES.end(), [&](auto &known) { return known.second == tensor.scalar_type(); });
        made.push_back({std::to_string(made.size()), type->first, {tensor.sizes().begin(), tensor.sizes().end()},
                        std::string(static_cast<const char *>(tensor.const_data_ptr()), tensor.nbytes())});
    }
    penstock::write_tensors(asked.at("outputs"), made, true);
    return Error::Ok;
}

std::atomic<int64_t> spare_bytes{0};  // of the heap, of which nothing else is made
std::atomic<void *> last_spare{nullptr};

// Loads a program and destroys it, again and again. Each lies at another address than the one before.
Error reload(const Json &program, const Json &asked) {
    Error error = Error::Ok;
    for (int left = asked.at("reload"); left && error == Error::Ok; --left) {
        error = Program(program).load(asked.at("method"), Json::object());
        void *const spare = std::malloc(sizeof(executorch::runtime::Program));
        *static_cast<void **>(spare) = last_spare.exchange(spare);  // in a chain, so that they are no leaks
        spare_bytes += static_cast<int64_t>(malloc_usable_size(spare) + sizeof(size_t));
    }
    return error;
}

int64_t process_bytes() {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.rfind("VmHWM:", 0) == 0) return 1024 * std::stoll(line.substr(6));
    return 0;
}

Json figures() {
    Json found = Json::object();
    if (!executorch::runtime::get_backend_class(BACKEND)) return found;
    for (const char *name : {"programs", "plan_budget", "bytes_moved", "misses", "peak_bytes"}) {
        BackendOption option = make_option(name, "");
        if (executorch::runtime::get_option(BACKEND, {&option, 1}) != Error::Ok) return found;
        found[name] = std::stoll(std::get<std::array<char, executorch::runtime::kMaxOptionValueLength>>(option.value).data());
    }
    return found;
}

Json run(const Json &asked, const Json &description, std::unique_ptr<Program> &program) {
    Error error = Error::Ok;
    if (asked.contains("shell"))
        error = std::system(asked.at("shell").get<std::string>().c_str()) ? Error::Internal : Error::Ok;
    else if (asked.contains("reload"))
        error = reload(description, asked);
    else if (!asked.contains("unload"))
        error = call(*program, asked);
    else if (asked.at("unload").is_string())
        program->module->unload_method(asked.at("unload"));
    else
        program.reset();
    Json said = figures();
    said["error"] = executorch::runtime::to_string(error);
    said["process_bytes"] = process_bytes();
    said["heap_bytes"] = static_cast<int64_t>(mallinfo2().uordblks) - spare_bytes;
    return said;
}

}  // namespace

int main(int, char **words) {
    static std::vector<std::unique_ptr<Program>> late;  // is destroyed behind what is made static from here on
    const Json asked = Json::parse(penstock::read_file(words[1]));
    for (const Json &library : asked.at("libraries"))
        if (!dlopen(library.get<std::string>().c_str(), RTLD_NOW | RTLD_GLOBAL)) return std::cerr << dlerror() << "\n", 1;
    std::vector<std::unique_ptr<Program>> programs;
    for (const Json &one : asked.at("programs")) programs.push_back(std::make_unique<Program>(one));
    const Json &calls = asked.at("calls");
    std::vector<Json> answers(calls.size());
    const auto run_calls = [&](size_t first, size_t last) {  // of these programs
        for (size_t k = 0; k < calls.size(); ++k)
            if (const size_t number = calls[k].at("program"); number >= first && number < last)
                answers[k] = run(calls[k], asked.at("programs")[number], programs[number]);
    };
    std::vector<std::thread> threads;
    if (asked.value("threads", false))
        for (size_t k = 0; k < programs.size(); ++k) threads.emplace_back(run_calls, k, k + 1);
    else
        run_calls(0, programs.size());
    for (std::thread &one : threads) one.join();
    std::cout << Json(answers).dump() << std::endl;
    if (asked.value("late", false)) late = std::move(programs);
}
