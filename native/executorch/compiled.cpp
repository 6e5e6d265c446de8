#include "compiled.h"

#include <dlfcn.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <exception>

#include "../failure.h"
#include "../run/sizes.h"

namespace penstock {

namespace {

constexpr const char *LIBRARY = "libpenstock_aoti.so";

// It stays loaded: it registers operators with torch. RTLD_DEEPBIND, because torch has a BLAS, a cpuinfo and a pthreadpool,
// and libexecutorch_kernels_optimized.so, or what it needs, has others by the same names: torch would compute with those.
const pa_library *open_library() {
    Dl_info here;
    const std::string own = dladdr(reinterpret_cast<void *>(&open_library), &here) ? here.dli_fname : "";
    const std::string path = own.substr(0, own.rfind('/') + 1) + LIBRARY;
    void *const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!handle)
        throw Failure(PS_PLAN, std::string("the program has code of AOTInductor's, which ") + LIBRARY + " runs, beside this "
                               "library, and that cannot be loaded (" + dlerror() + "): build it with scripts/build-delegate "
                               "beside torch, or export the program with kernels=\"executorch\"");
    const auto entry = reinterpret_cast<decltype(&penstock_aoti)>(dlsym(handle, PA_ENTRY));
    if (!entry || entry()->version != PA_VERSION)
        throw Failure(PS_PLAN, path + " is of another version than this library: build both with scripts/build-delegate");
    return entry();
}

const pa_library &library() {
    static const pa_library *const opened = open_library();
    return *opened;
}

template <typename Call, typename... Arguments>
void checked(Call call, Arguments... arguments) {
    char error[4096];
    const ps_status status = call(arguments..., error, sizeof error);
    if (status != PS_OK) throw Failure(status, error);
}

// A tensor for torch, with the sizes that it points to.
struct Handed {
    std::vector<int64_t> sizes, strides;
    pa_tensor tensor;

    template <typename Sizes, typename Order>
    Handed(const char *name, void *address, const Sizes &shape, const Order &order, ScalarType type)
        : sizes(shape.begin(), shape.end()), strides(shape.size()) {
        int64_t stride = 1;
        for (size_t k = shape.size(); k--;) {
            strides[order[k]] = stride;
            stride *= std::max<int64_t>(sizes[order[k]], 1);
        }
        tensor = {name, address, sizes.data(), strides.data(), static_cast<int32_t>(sizes.size()), static_cast<int32_t>(type)};
    }
    explicit Handed(const Tensor &one)
        : Handed(nullptr, const_cast<void *>(one.const_data_ptr()), one.sizes(), one.dim_order(), one.scalar_type()) {}
    Handed(Handed &&) = default;
};

std::vector<pa_tensor> tensors_of(const std::vector<Handed> &handed) {
    std::vector<pa_tensor> tensors;
    for (const Handed &one : handed) tensors.push_back(one.tensor);
    return tensors;
}

Tensor &tensor_of(EValue *value) {
    if (!value->isTensor())
        throw Failure(PS_PAYLOAD, "compiled code takes and gives tensors only, and the program has a number there: export it again");
    return value->toTensor();
}

// Where the probe calls of a run go: exceptions do not pass through torch.
struct Calls {
    LoadedProgram &program;
    int graph;
    std::exception_ptr failure;

    static int probe(void *context, int32_t call) {
        auto &self = *static_cast<Calls *>(context);
        try {
            self.program.probe(self.graph, call);
            return 0;
        } catch (...) {
            self.failure = std::current_exception();
            return 1;
        }
    }
};

}  // namespace

CompiledMethod::CompiledMethod(const NamedDataMap &map, const LoadedProgram &program, const Json &region,
                               const std::vector<Placed> &weights)
    : inputs_(region.at("takes")), symbols_(region.at("symbols")) {
    for (const Json &input : inputs_) types_.push_back(scalar_type(input.at("dtype")));
    const std::string method = region.at("method");
    const FreeableBuffer bytes = read_checked(map, region.at("program"));
    checked(library().load, static_cast<const char *>(bytes.data()), bytes.size(), method.c_str(), program.torch().c_str(),
            program.machine().c_str(), &code_);
    std::vector<Handed> handed;
    for (const Placed &one : weights)
        handed.emplace_back(one.name.c_str(), one.address, one.shape, one.dim_order, one.type);
    try {
        checked(library().bind, code_, static_cast<const pa_tensor *>(tensors_of(handed).data()), handed.size());
    } catch (...) {
        library().close(code_);
        throw;
    }
}

CompiledMethod::~CompiledMethod() { library().close(code_); }

void CompiledMethod::check(Span<EValue *> arguments) const {
    std::map<std::string, int64_t> seen;
    for (size_t k = 0; k < types_.size(); ++k) {
        const Tensor &given = tensor_of(arguments[k]);
        const std::string name = inputs_[k].at("name");
        if (given.scalar_type() != types_[k])
            throw Failure(PS_PLAN, "input " + name + ": expected " + executorch::runtime::toString(types_[k]) + ", got " +
                                       executorch::runtime::toString(given.scalar_type()) +
                                       "; pass what the program was exported for");
        check_sizes(inputs_[k], given.sizes(), symbols_, false, seen);
    }
}

void CompiledMethod::run(LoadedProgram &program, int graph, Span<EValue *> arguments) {
    const struct Dropped {
        pa_code *code;
        ~Dropped() { library().drop(code); }
    } dropped{code_};
    const size_t inputs = types_.size();
    std::vector<Handed> handed;
    for (size_t k = 0; k < inputs; ++k) handed.emplace_back(tensor_of(arguments[k]));
    Calls calls{program, graph, nullptr};
    try {
        checked(library().run, code_, static_cast<const pa_tensor *>(tensors_of(handed).data()), inputs, &Calls::probe,
                static_cast<void *>(&calls));
    } catch (...) {
        if (calls.failure) std::rethrow_exception(calls.failure);
        throw;
    }
    for (size_t k = inputs; k < arguments.size(); ++k) give_output(k - inputs, tensor_of(arguments[k]));
}

void CompiledMethod::give_output(size_t result, Tensor &to) {
    int32_t dims = 0;
    const int64_t *const sizes = library().sizes(code_, result, &dims);
    if (!sizes) throw Failure(PS_PAYLOAD, "the compiled code gives fewer results than the program has: export it again");
    const std::vector<int32_t> shape(sizes, sizes + dims);
    if (executorch::runtime::resize_tensor(to, {shape.data(), shape.size()}) != Error::Ok)
        throw Failure(PS_PAYLOAD, "a result of the compiled code has no room in the program: export it again");
    const Handed handed(to);
    checked(library().copy, static_cast<const pa_code *>(code_), result, &handed.tensor);
}

}  // namespace penstock
