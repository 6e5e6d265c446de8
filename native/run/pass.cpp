#include "pass.h"

namespace penstock {

Pass::Pass(ps_engine *engine, int32_t graph, const volatile std::sig_atomic_t &interrupted)
    : engine_(engine), graph_(graph), interrupted_(interrupted) {}

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

}  // namespace penstock
