// Built for TORCH_TARGET_VERSION 2.10: it uses nothing of torch but its stable interface.
#include "operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

namespace penstock {

namespace {

thread_local Pass *current_pass = nullptr;

// The weights are named only so that compilers keep the kernels that read them between the two calls.
void call(int64_t graph, int64_t call) {
    Pass *const pass = Pass::current();
    if (!pass) throw std::runtime_error("a graph with probes ran outside of a pass: nothing streams its weights");
    (void)graph;  // one pass runs one method
    try {
        pass->probe(static_cast<int32_t>(call));
    } catch (const Failure &failure) {
        pass->failure = {failure.status, failure.what()};
        throw;
    } catch (const Interrupted &) {
        pass->was_interrupted = true;
        throw std::runtime_error("interrupted");
    }
}

void acquire(std::vector<torch::stable::Tensor>, int64_t graph, int64_t step) { call(graph, 2 * step); }
void release(std::vector<torch::stable::Tensor>, int64_t graph, int64_t step) { call(graph, 2 * step + 1); }

}  // namespace

Pass::Pass(ps_engine *engine, int32_t graph, const volatile std::sig_atomic_t &interrupted)
    : engine_(engine), graph_(graph), interrupted_(interrupted) {
    current_pass = this;
}

Pass::~Pass() { current_pass = nullptr; }

Pass *Pass::current() { return current_pass; }

void Pass::begin() {
    finish(ps_begin(engine_, graph_));
    probe(PS_PASS_BEGINS);
}

void Pass::probe(int32_t call) { finish(ps_probe(engine_, graph_, call)); }

void Pass::end() {
    probe(PS_PASS_ENDS);
    finish(ps_end(engine_, graph_));
}

// The engine waits for as long as its `patience_ms` at a time, so that an interrupt is seen.
void Pass::finish(ps_status status) {
    while (true) {
        if (interrupted_) throw Interrupted();
        if (status == PS_OK) return;
        if (status != PS_WAITING) throw Failure(status, ps_error(engine_));
        status = ps_wait(engine_);
    }
}

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, library) {
    library.def("acquire(Tensor(a!)[] weights, int graph, int step) -> ()");
    library.def("release(Tensor(a!)[] weights, int graph, int step) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, library) {
    library.impl("acquire", TORCH_BOX(&acquire));
    library.impl("release", TORCH_BOX(&release));
}

}  // namespace penstock
