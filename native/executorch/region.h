// What one delegate runs: a part of a method whose weights are in memory only while it runs.
#pragma once

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/method.h>

#include <optional>

#include "compiled.h"

namespace penstock {

// What `processed_bytes` say of a region, behind the sha256 of it. Raises Failure for bytes that are damaged, or of another
// version.
Json region_facts(const std::string &processed);

class Region {
  public:
    // `facts` are those of docs/payload.md, "A region". Raises Failure.
    Region(const NamedDataMap &map, const Json &facts, const LoadOptions &options);
    Region(const Region &) = delete;

    // Runs once. `arguments` are the delegate's inputs and, behind them, its outputs. Raises Failure.
    void run(Span<EValue *> arguments);

  private:
    void load(const NamedDataMap &map, const Json &facts);
    void append(const Json &facts);
    Placed placed(const Json &facts, const Json &appended) const;
    void set_arguments(Span<EValue *> arguments);
    void give_outputs(Span<EValue *> arguments);

    int graph_, region_, step_;
    size_t inputs_, outputs_, states_ = 0;
    bool last_;
    std::shared_ptr<LoadedProgram> program_;  // destroyed behind the method, which uses its memory
    executorch::extension::MallocMemoryAllocator structures_, temporary_;
    executorch::runtime::MemoryManager memory_;
    std::optional<executorch::runtime::Method> method_;
    std::optional<CompiledMethod> compiled_;  // in place of `method_`
};

}  // namespace penstock
