#include "pass.h"

namespace penstock {

Pass::Pass(ps_engine *engine, int32_t graph, const std::map<int64_t, PooledRead> &reads,
           const volatile std::sig_atomic_t &interrupted)
    : engine_(engine), graph_(graph), reads_(reads), interrupted_(interrupted) {}

void Pass::begin() {
    finish(ps_begin(engine_, graph_));
    probe(PS_PASS_BEGINS);
}

void Pass::probe(int32_t call) { finish(ps_probe(engine_, graph_, call)); }

void Pass::end() {
    probe(PS_PASS_ENDS);
    finish(ps_end(engine_, graph_));
}

const PooledRead *Pass::find(int64_t read) const {
    const auto found = reads_.find(read);
    return found == reads_.end() ? nullptr : &found->second;
}

std::vector<Units::Numbers> Pass::ask(const PooledRead &read, const Numbers &units) {
    const auto count = static_cast<int64_t>(units.size());
    Numbers ends(units.size());
    int64_t parts = 0;
    finish(ps_units_ask(engine_, graph_, read.step, units.data(), count, ends.data(), &parts));
    std::vector<Numbers> found;
    int64_t start = 0;
    for (int64_t k = 0; k < parts; start = ends[k++]) found.emplace_back(units.begin() + start, units.begin() + ends[k]);
    return found;
}

void Pass::hold(const PooledRead &read, const Numbers &units, bool alone) {
    finish(ps_units_hold(engine_, graph_, read.step, units.data(), static_cast<int64_t>(units.size()), alone));
}

void Pass::release(const PooledRead &read, const Numbers &units) {
    ps_units_release(engine_, graph_, read.step, units.data(), static_cast<int64_t>(units.size()));
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
