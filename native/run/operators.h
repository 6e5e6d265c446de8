// The operators that mark the reads of weights, penstock::acquire and penstock::release, for compiled code that runs
// without Python. They are registered on torch's stable interface when the program starts.
#pragma once

#include <csignal>
#include <optional>

#include "../failure.h"

namespace penstock {

// One pass of a method. The operators that are called on its thread, while it exists, reach its engine. What goes wrong
// in them is kept in `failure`, because torch hands on only that something did.
class Pass {
  public:
    Pass(ps_engine *engine, int32_t graph, const volatile std::sig_atomic_t &interrupted);
    ~Pass();
    Pass(const Pass &) = delete;

    // These raise Failure, and Interrupted once `interrupted` is set.
    void begin();
    void probe(int32_t call);
    void end();

    static Pass *current();

    std::optional<Sentence> failure;
    bool was_interrupted = false;

  private:
    void finish(ps_status status);

    ps_engine *const engine_;
    const int32_t graph_;
    const volatile std::sig_atomic_t &interrupted_;
};

struct Interrupted {};

}  // namespace penstock
