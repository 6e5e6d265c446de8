// A compiled method of an artifact, bound to memory that an engine streams its weights into.
#pragma once

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "../penstock.h"
#include "artifact.h"
#include "safetensors.h"

namespace penstock {

struct RunOptions {
    std::string method;  // empty for the only one
    int32_t readers = 3;
    bool buffered = false;
};

class StreamedProgram {
  public:
    // Loads a method of an artifact, whose weights stream by `plan`. Raises Failure.
    StreamedProgram(const Artifact &artifact, const Json &plan, const RunOptions &options,
                    const volatile std::sig_atomic_t &interrupted);
    ~StreamedProgram();
    StreamedProgram(const StreamedProgram &) = delete;

    // Takes the inputs of all passes, by their names. Raises PS_PLAN for what the method was not exported for.
    void bind(const std::vector<NamedTensor> &inputs);

    // Runs one pass, and returns its seconds. Raises Failure and Interrupted; the next call starts over.
    double run();

    // The outputs of the last pass.
    std::vector<NamedTensor> outputs() const;
    ps_statistics statistics() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace penstock
