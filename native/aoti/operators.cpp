// Built for TORCH_TARGET_VERSION 2.10: it uses nothing of torch but its stable interface.
#include "operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "../failure.h"

namespace penstock {

namespace {

using Library = torch::stable::detail::StableLibrary;
using Registration = torch::stable::detail::StableTorchLibraryInit;

thread_local Probes *current_probes = nullptr;

// The weights are named only so that compilers keep the kernels that read them between the two calls.
void call(int64_t call) {
    Probes *const probes = Probes::current();
    if (!probes) throw std::runtime_error("a graph with probes ran outside of a pass: nothing streams its weights");
    try {
        probes->probe(static_cast<int32_t>(call));
    } catch (...) {
        probes->failure = std::current_exception();
        throw std::runtime_error("a probe failed");
    }
}

// One pass runs one method, so the number of the graph tells nothing.
void acquire(std::vector<torch::stable::Tensor>, int64_t, int64_t step) { call(2 * step); }
void release(std::vector<torch::stable::Tensor>, int64_t, int64_t step) { call(2 * step + 1); }

void define(Library &library) {
    library.def("acquire(Tensor(a!)[] weights, int graph, int step) -> ()");
    library.def("release(Tensor(a!)[] weights, int graph, int step) -> ()");
}

void implement(Library &library) {
    library.impl("acquire", TORCH_BOX(&acquire));
    library.impl("release", TORCH_BOX(&release));
}

}  // namespace

Probes::Probes() : before_(current_probes) { current_probes = this; }

Probes::~Probes() { current_probes = before_; }

Probes *Probes::current() { return current_probes; }

void register_operators() {
    try {
        // Never destroyed: an application may run and destroy programs after everything that is static here.
        static const auto *const defined =
            new Registration(Library::Kind::FRAGMENT, define, "penstock", nullptr, __FILE__, __LINE__);
        static const auto *const implemented = new Registration(
            Library::Kind::IMPL, implement, "penstock", "CompositeExplicitAutograd", __FILE__, __LINE__);
        (void)defined, (void)implemented;
    } catch (const std::exception &) {
        throw Failure(PS_PLAN, "this process has penstock's operators already, as Python's penstock or another copy of this "
                               "library brings them: run the program in a process of its own");
    }
}

}  // namespace penstock
