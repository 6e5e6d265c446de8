// What all delegates of one loaded program share: an engine, its arena, the states, and the code of the regions.
#pragma once

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/backend/backend_init_context.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/program.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "catalog.h"
#include "named_data.h"

namespace penstock {

// What the caller gave when the program was loaded (LoadBackendOptionsMap), each where it was given.
struct LoadOptions {
    std::string budget, weights;
    int readers = 3;

    // Raises PS_PLAN for an option that there is not, or of another type.
    explicit LoadOptions(Span<const executorch::runtime::BackendOption> given);

    // Raises PS_PLAN for options of another method of the program that are not these.
    void refuse_others(const LoadOptions &others) const;
};

struct EngineCloser {
    void operator()(ps_engine *engine) const { ps_close(engine); }
};

struct MemoryFreer {
    void operator()(char *memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, MemoryFreer>;

// A program's payload, by the program's own data: two that were loaded from one file have two.
using ProgramKey = std::pair<const NamedDataMap *, std::string>;

class LoadedProgram {
  public:
    // The one that a delegate belongs to, made for the first delegate of a loaded program, and gone with the last.
    // `budget` is for a program that was loaded without one, negative for all weights. Raises Failure.
    static std::shared_ptr<LoadedProgram> of(const NamedDataMap &map, const std::string &payload, int64_t budget,
                                             const LoadOptions &options);

    // Those that are loaded now.
    static std::vector<std::shared_ptr<LoadedProgram>> all();

    LoadedProgram(const NamedDataMap &map, ProgramKey key, int64_t budget, const LoadOptions &options);
    LoadedProgram(const LoadedProgram &) = delete;
    ~LoadedProgram();

    // Where a storage lies while it is acquired; a state and what the plan keeps outside of the arena, always.
    char *address(int storage) const;
    const Catalog &catalog() const { return *catalog_; }

    // The code of regions, and the memory of their intermediate values, which regions use one after another.
    const executorch::runtime::Program &code(const NamedDataMap &map, const std::string &key);
    executorch::runtime::HierarchicalAllocator *scratch() { return &scratch_; }

    // One region at a time runs, between these: the pass begins with a method's first region and ends with its last.
    // `step` is negative for a region that reads nothing that streams. They raise Failure.
    void enter(int graph, int region, int step);
    void leave(int graph, int step, bool last);
    void abort();
    void probe(int graph, int32_t call) const { check(ps_probe(engine_.get(), graph, call)); }  // of compiled code
    std::mutex &running() { return running_; }

    ps_statistics statistics() const;
    int64_t plan_budget() const { return plan_budget_; }

    // The version of torch that has compiled its code, and what for; empty where nothing is compiled.
    const std::string &torch() const { return torch_; }
    const std::string &machine() const { return machine_; }

  private:
    // The bytes of a program, which stay where they are, and the program.
    struct Code {
        Code(const NamedDataMap &map, const std::string &key);
        FreeableBuffer bytes;
        executorch::extension::BufferDataLoader loader;
        std::unique_ptr<executorch::runtime::Program> program;
    };

    void open(const Json &payload, const Json &plan, const LoadOptions &options);
    void fill_outside(const Json &plan, const Json &storages);
    void reserve_scratch(const NamedDataMap &map);
    void check(ps_status status) const;

    const ProgramKey key_;
    const LoadOptions options_;
    std::string torch_, machine_;
    std::unique_ptr<NamedWeights> weights_;  // before the engine, which reads from it
    std::unique_ptr<ps_engine, EngineCloser> engine_;
    std::optional<Catalog> catalog_;
    std::map<int, std::pair<Memory, char *>> outside_;  // and where the storage begins in it
    std::map<std::string, std::unique_ptr<Code>> codes_;
    std::vector<Memory> scratch_memory_;
    std::vector<Span<uint8_t>> scratch_spans_;
    executorch::runtime::HierarchicalAllocator scratch_{{}};
    std::mutex running_;
    int64_t plan_budget_ = 0, outside_bytes_ = 0;
    int graph_ = -1;  // of the pass that runs, -1 between passes
};

}  // namespace penstock
