// The code of a whole method that AOTInductor compiled. libpenstock_aoti.so runs it, which stands beside this library and
// is loaded when the first such method is: this library has nothing of torch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../aoti/aoti.h"
#include "loaded_program.h"

namespace penstock {

// A weight or a state, where it lies. It has no address if the code asks for it and never reads it.
struct Placed {
    std::string name;
    char *address;
    std::vector<int32_t> shape;
    std::vector<uint8_t> dim_order;
    ScalarType type;
};

class CompiledMethod {
  public:
    // Loads the method of a package that a region names, and gives it its weights. Raises Failure.
    CompiledMethod(const NamedDataMap &map, const LoadedProgram &program, const Json &region, const std::vector<Placed> &weights);
    ~CompiledMethod();
    CompiledMethod(const CompiledMethod &) = delete;

    // Raises Failure for inputs of another dtype or size than the code was compiled for: it would read and write beyond
    // their ends.
    void check(Span<EValue *> arguments) const;

    // Runs a pass of graph number `graph` between its beginning and its end. `arguments` are the inputs and, behind them, the
    // outputs. Raises Failure.
    void run(LoadedProgram &program, int graph, Span<EValue *> arguments);

  private:
    void give_output(size_t result, Tensor &to);

    const Json inputs_, symbols_;
    std::vector<ScalarType> types_;  // of the inputs
    pa_code *code_ = nullptr;
};

}  // namespace penstock
