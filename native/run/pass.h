// One pass of a method over an engine.
#pragma once

#include <csignal>
#include <map>
#include <vector>

#include "../aoti/by_units.h"
#include "../aoti/operators.h"
#include "../failure.h"

namespace penstock {

struct Interrupted {};

class Pass final : public Probes, public Units {
  public:
    // `reads` are those of the method by units, by their numbers.
    Pass(ps_engine *engine, int32_t graph, const std::map<int64_t, PooledRead> &reads,
         const volatile std::sig_atomic_t &interrupted);

    // These raise Failure, and Interrupted once `interrupted` is set.
    void begin();
    void probe(int32_t call) override;
    void end();

    Units *units() override { return reads_.empty() ? nullptr : this; }
    const PooledRead *find(int64_t read) const override;
    std::vector<Numbers> ask(const PooledRead &read, const Numbers &units) override;
    void hold(const PooledRead &read, const Numbers &units, bool alone) override;
    void release(const PooledRead &read, const Numbers &units) override;

  private:
    void finish(ps_status status);

    ps_engine *const engine_;
    const int32_t graph_;
    const std::map<int64_t, PooledRead> &reads_;
    const volatile std::sig_atomic_t &interrupted_;
};

}  // namespace penstock
