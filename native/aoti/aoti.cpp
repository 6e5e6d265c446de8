#include "aoti.h"

#include <algorithm>
#include <cstdio>

#include "../failure.h"
#include "package.h"

using penstock::Failure;

struct pa_code {
    penstock::Package package;
    std::vector<at::Tensor> results;
};

namespace {

constexpr uintptr_t ALIGNMENT = 64;  // of torch's own memory: kernels choose their code by it

struct Caller final : penstock::Probes {
    const pa_probe probe_of_caller;
    void *const context;

    Caller(pa_probe probe, void *context) : probe_of_caller(probe), context(context) {}
    void probe(int32_t call) override {
        if (probe_of_caller(context, call)) throw Failure(PS_STREAM, "a probe failed");
    }
};

template <typename Run>
ps_status guarded(char *error, size_t size, Run run) {
    const auto say = [&](const char *begin) {
        const penstock::Sentence found = penstock::caught();
        const size_t end = std::min(found.text.find('\n'), found.text.size());
        std::snprintf(error, size, "%s%.*s", begin, static_cast<int>(end), found.text.c_str());
        return found.status;
    };
    try {
        run();
        return PS_OK;
    } catch (const Failure &) {
        return say("");
    } catch (const std::bad_alloc &) {
        return say("");
    } catch (...) {
        return say("the compiled code failed: ");
    }
}

at::Tensor tensor_of(const pa_tensor &given) {
    const at::IntArrayRef sizes(given.sizes, given.dims), strides(given.strides, given.dims);
    const at::TensorOptions options(static_cast<at::ScalarType>(given.dtype));
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (!given.address && !empty)
        throw Failure(PS_PLAN, "an input or a result has no memory: set the program's inputs and outputs before it runs");
    return empty ? at::empty_strided(sizes, strides, options) : at::from_blob(given.address, sizes, strides, options);
}

// The memory of a weight. What no step reads gets a place that is never touched.
at::Tensor weight_of(const pa_tensor &given) {
    if (given.address) return tensor_of(given);
    const at::IntArrayRef sizes(given.sizes, given.dims), strides(given.strides, given.dims);
    return at::empty_strided(sizes, strides, at::TensorOptions(static_cast<at::ScalarType>(given.dtype)));
}

// The memory of the caller's, or a copy where compiled code could not take it, or would give other last bits.
at::Tensor input_of(const pa_tensor &given) {
    const at::Tensor tensor = tensor_of(given);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % ALIGNMENT == 0;
    return aligned && tensor.is_contiguous() ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

ps_status load(const char *bytes, size_t nbytes, const char *method, const char *torch, const char *machine, pa_code **code,
               char *error, size_t size) {
    return guarded(error, size, [&] {
        penstock::check_machine(torch, machine);
        *code = new pa_code{penstock::Package({bytes, nbytes}, method), {}};
    });
}

ps_status bind(pa_code *code, const pa_tensor *weights, size_t count, char *error, size_t size) {
    return guarded(error, size, [&] {
        std::unordered_map<std::string, at::Tensor> bound;
        for (const std::string &name : code->package.weights()) {
            const auto found = std::find_if(weights, weights + count, [&](const pa_tensor &one) { return name == one.name; });
            if (found == weights + count)
                throw Failure(PS_PAYLOAD, "the compiled code reads a weight " + name + " that it is not given: export it again");
            bound[name] = weight_of(*found);
        }
        code->package.bind(std::move(bound));
    });
}

ps_status run(pa_code *code, const pa_tensor *inputs, size_t count, pa_probe probe, void *context, char *error, size_t size) {
    return guarded(error, size, [&] {
        std::vector<at::Tensor> given;
        for (size_t k = 0; k < count; ++k) given.push_back(input_of(inputs[k]));
        Caller caller(probe, context);
        code->results = code->package.run(std::move(given), caller);
    });
}

const int64_t *sizes(const pa_code *code, size_t result, int32_t *dims) {
    if (result >= code->results.size()) return nullptr;
    static const int64_t none = 0;
    *dims = static_cast<int32_t>(code->results[result].dim());
    return *dims ? code->results[result].sizes().data() : &none;
}

ps_status copy(const pa_code *code, size_t result, const pa_tensor *to, char *error, size_t size) {
    return guarded(error, size, [&] {
        const at::Tensor &made = code->results.at(result), target = tensor_of(*to);
        if (made.scalar_type() != target.scalar_type() || made.sizes() != target.sizes())
            throw Failure(PS_PAYLOAD, "the compiled code gives other results than the program has: export it again");
        target.copy_(made);
    });
}

void drop(pa_code *code) { code->results.clear(); }

void close(pa_code *code) { delete code; }

}  // namespace

const pa_library *penstock_aoti(void) {
    static const pa_library library{PA_VERSION, load, bind, run, sizes, copy, drop, close};
    return &library;
}
