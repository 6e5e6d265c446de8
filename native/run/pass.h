// One pass of a method over an engine.
#pragma once

#include <csignal>

#include "../aoti/operators.h"
#include "../failure.h"

namespace penstock {

struct Interrupted {};

class Pass final : public Probes {
  public:
    Pass(ps_engine *engine, int32_t graph, const volatile std::sig_atomic_t &interrupted);

    // These raise Failure, and Interrupted once `interrupted` is set.
    void begin();
    void probe(int32_t call) override;
    void end();

  private:
    void finish(ps_status status);

    ps_engine *const engine_;
    const int32_t graph_;
    const volatile std::sig_atomic_t &interrupted_;
};

}  // namespace penstock
