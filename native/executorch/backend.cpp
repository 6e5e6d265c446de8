// The delegate: ExecuTorch's interface to regions whose weights stream. It registers itself when the library is loaded.

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/clock.h>
#include <executorch/runtime/platform/platform.h>

#include "../failure.h"
#include "region.h"

namespace penstock {

using executorch::runtime::ArrayRef;
using executorch::runtime::Backend;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::BackendOptionContext;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;

namespace {

constexpr const char *NAME = "PenstockBackend";

Error error_of(ps_status status) {
    switch (status) {
        case PS_PAYLOAD: return Error::InvalidProgram;
        case PS_PLAN: return Error::InvalidArgument;
        case PS_SOURCE: return Error::InvalidExternalData;
        default: return Error::OutOfResources;
    }
}

// Says what went wrong where ExecuTorch's messages go. Its own macro cuts a sentence after 255 characters.
Error say(Error error, const std::string &sentence) {
    const std::string text = "penstock: " + sentence;
    executorch::runtime::pal_emit_log_message(executorch::runtime::pal_current_ticks(), et_pal_log_level_t::kError, NAME, "",
                                              0, text.c_str(), text.size());
    return error;
}

template <typename Run>
Error guarded(Run run) {
    try {
        run();
        return Error::Ok;
    } catch (const Failure &failure) {
        return say(error_of(failure.status), failure.what());
    } catch (const Json::exception &error) {
        return say(Error::InvalidProgram, std::string("the payload is malformed (") + error.what() + "): export it again");
    } catch (const std::bad_alloc &) {
        return say(Error::MemoryAllocationFailed, caught().text);
    } catch (...) {
        return say(Error::Internal, caught().text);
    }
}

// What all loaded programs together have done, by name.
int64_t statistic(const std::string &name) {
    static const std::map<std::string, int64_t ps_statistics::*> known{
        {"bytes_moved", &ps_statistics::bytes_moved}, {"bytes_read", &ps_statistics::bytes_read},
        {"misses", &ps_statistics::misses},           {"stall_ns", &ps_statistics::stall_ns},
        {"held_bytes", &ps_statistics::held_bytes},   {"peak_bytes", &ps_statistics::peak_bytes}};
    const auto found = known.find(name);
    int64_t sum = 0;
    for (const auto &program : LoadedProgram::all())
        sum += name == "programs"      ? 1
               : name == "plan_budget" ? program->plan_budget()
               : found == known.end()  ? throw Failure(PS_PLAN, "there is no option " + name)
                                       : program->statistics().*found->second;
    return sum;
}

class PenstockBackend final : public BackendInterface {
  public:
    bool is_available() const override { return true; }

    Result<DelegateHandle *> init(BackendInitContext &context, FreeableBuffer *processed,
                                  ArrayRef<CompileSpec>) const override {
        Region *region = nullptr;
        const Error error = guarded([&] {
            const Json facts = region_facts(copy_of(*processed, "a delegate"));
            if (!context.get_named_data_map())
                throw Failure(PS_PAYLOAD, "the program has no named data, where its payload is: export it again");
            region = new Region(*context.get_named_data_map(), facts, LoadOptions(context.runtime_specs()));
            processed->Free();
        });
        if (error != Error::Ok) return error;
        return region;
    }

    Error execute(BackendExecutionContext &, DelegateHandle *handle, Span<EValue *> arguments) const override {
        return guarded([&] { static_cast<Region *>(handle)->run(arguments); });
    }

    void destroy(DelegateHandle *handle) const override { delete static_cast<Region *>(handle); }

    // Fills in texts, because numbers here have 32 bits.
    Error get_option(BackendOptionContext &, Span<BackendOption> &options) override {
        return guarded([&] {
            for (BackendOption &option : options) {
                std::array<char, executorch::runtime::kMaxOptionValueLength> text{};
                std::snprintf(text.data(), text.size(), "%lld", static_cast<long long>(statistic(option.key)));
                option.value = text;
            }
        });
    }
};

// Never destroyed: ExecuTorch calls it for programs that outlive what is static here.
PenstockBackend &backend = *new PenstockBackend;
const Error registered = executorch::runtime::register_backend({NAME, &backend});

}  // namespace

}  // namespace penstock
