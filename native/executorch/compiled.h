// The code of a whole method that AOTInductor compiled. libpenstock_aoti.so runs it, which stands beside this library and
// is loaded when the first such method is: this library has nothing of torch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../aoti/aoti.h"
#include "loaded_program.h"

namespace penstock {

// A weight or a state, where it lies.
struct Placed {
    std::string name;
    char *address;
    std::vector<int32_t> shape;
    std::vector<uint8_t> dim_order;
    ScalarType type;
};

class CompiledMethod {
  public:
    // Loads the method of a package, by its name there, and gives it its weights. Raises Failure.
    CompiledMethod(const NamedDataMap &map, const LoadedProgram &program, const std::string &key, const std::string &method,
                   const std::vector<Placed> &weights);
    ~CompiledMethod();
    CompiledMethod(const CompiledMethod &) = delete;

    // Runs a pass of graph number `graph` between its beginning and its end. `arguments` are `inputs` inputs and, behind
    // them, the outputs. Raises Failure.
    void run(LoadedProgram &program, int graph, Span<EValue *> arguments, size_t inputs);

  private:
    void give_output(size_t result, Tensor &to);

    pa_code *code_ = nullptr;
};

}  // namespace penstock
