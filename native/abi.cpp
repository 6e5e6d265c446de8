// The C functions: what is raised inside becomes a status and a sentence.

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engine.h"
#include "guard.h"

using penstock::Engine;

struct ps_engine {
    ps_engine(const char *payload, const char *plan, const char *folder, const ps_options &options)
        : engine(payload, plan, folder, options), owner(getpid()) {}
    Engine engine;
    const int owner;
    std::string error;
};

namespace {

template <typename Run>
ps_status guarded(std::string &error, Run run) {
    try {
        return run() ? PS_OK : PS_WAITING;
    } catch (...) {
        penstock::Sentence found = penstock::caught();
        error.swap(found.text);
        return found.status;
    }
}

void copy_sentence(const std::string &text, char *error, size_t size) {
    if (!size) return;
    std::strncpy(error, text.c_str(), size - 1);
    error[size - 1] = 0;
}

}  // namespace

int32_t ps_version() { return PS_VERSION; }

int32_t ps_guard(const void *memory, int64_t nbytes) { return penstock::guard(memory, nbytes); }
int32_t ps_guard_hit(int32_t guard) { return penstock::guard_hit(guard); }
void ps_unguard(int32_t guard) { penstock::unguard(guard); }

ps_status ps_open(const char *payload, const char *plan, const char *folder, const ps_options *options,
                  ps_engine **engine, char *error, size_t size) {
    *engine = nullptr;
    std::string text;
    const ps_status status = guarded(text, [&] {
        *engine = new ps_engine(payload, plan, folder, *options);
        return true;
    });
    if (status != PS_OK) copy_sentence(text, error, size);
    return status;
}

ps_status ps_probe(ps_engine *engine, int32_t graph, int32_t call) {
    return guarded(engine->error, [&] { return engine->engine.probe(graph, call); });
}

ps_status ps_fetch(const ps_engine *engine, int32_t storage, void *address, char *error, size_t size) {
    std::string text;
    const ps_status status =
        guarded(text, [&] { return engine->engine.fetch(storage, static_cast<char *>(address)), true; });
    if (status != PS_OK) copy_sentence(text, error, size);
    return status;
}

void *ps_storage(const ps_engine *engine, int32_t storage) {
    const auto count = static_cast<int32_t>(engine->engine.plan().storages.size());
    return storage < 0 || storage >= count ? nullptr : engine->engine.address(storage);
}

int32_t ps_probed(const ps_engine *engine, int32_t graph, int32_t *steps, int32_t size) {
    const penstock::Method *const method = engine->engine.plan().method(graph);
    if (!method) return -1;
    const auto count = static_cast<int32_t>(method->probed.size());
    for (int32_t k = 0; k < count && k < size; ++k) steps[k] = method->probed[k];
    return count;
}

ps_status ps_begin(ps_engine *engine, int32_t graph) {
    return guarded(engine->error, [&] { return engine->engine.begin(graph); });
}

ps_status ps_acquire(ps_engine *engine, int32_t graph, int32_t step) {
    return guarded(engine->error, [&] { return engine->engine.acquire(graph, step); });
}

ps_status ps_release(ps_engine *engine, int32_t graph, int32_t step) {
    return guarded(engine->error, [&] { return engine->engine.release(graph, step); });
}

ps_status ps_end(ps_engine *engine, int32_t graph) {
    return guarded(engine->error, [&] { return engine->engine.end(graph); });
}

ps_status ps_abort(ps_engine *engine) {
    return guarded(engine->error, [&] { return engine->engine.abort(), true; });
}

ps_status ps_wait(ps_engine *engine) {
    return guarded(engine->error, [&] { return engine->engine.wait(); });
}

void ps_stats(const ps_engine *engine, ps_statistics *statistics) { *statistics = engine->engine.statistics(); }

int32_t ps_memory(const ps_engine *engine, void **starts, void **stops, int32_t size) {
    int32_t count = 0;
    std::string unsaid;
    guarded(unsaid, [&] {
        auto memory = engine->engine.arena().memory();
        if (const penstock::Pool *const pool = engine->engine.pool()) memory.push_back(&pool->memory());
        count = static_cast<int32_t>(memory.size());
        for (int32_t k = 0; k < count && k < size; ++k) {
            starts[k] = memory[k]->at(0);
            stops[k] = memory[k]->at(memory[k]->nbytes());
        }
        return true;
    });
    return count;
}

void *ps_units_storage(const ps_engine *engine, int32_t storage) {
    const auto count = static_cast<int32_t>(engine->engine.plan().storages.size());
    const penstock::Pool *const pool = engine->engine.pool();
    return !pool || storage < 0 || storage >= count ? nullptr : pool->address(storage);
}

ps_status ps_units_ask(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count, int64_t *ends,
                       int64_t *parts) {
    return guarded(engine->error, [&] {
        const std::vector<int64_t> found = engine->engine.units().ask(graph, step, {units, count});
        std::copy(found.begin(), found.end(), ends);
        *parts = static_cast<int64_t>(found.size());
        return true;
    });
}

ps_status ps_units_hold(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count, int32_t alone) {
    return guarded(engine->error, [&] { return engine->engine.units().hold(graph, step, {units, count}, alone); });
}

ps_status ps_units_release(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count) {
    return guarded(engine->error, [&] { return engine->engine.units().release(graph, step, {units, count}), true; });
}

void ps_units_stats(const ps_engine *engine, ps_statistics *statistics) {
    const penstock::Pool *const pool = engine->engine.pool();
    *statistics = pool ? pool->statistics() : ps_statistics{};
}

int64_t ps_units_changes(const ps_engine *engine, ps_change *changes, int64_t size) {
    int64_t count = 0;
    std::string unsaid;
    guarded(unsaid, [&] {
        const penstock::Pool *const pool = engine->engine.pool();
        const std::vector<ps_change> found = pool ? pool->changes() : std::vector<ps_change>();
        count = static_cast<int64_t>(found.size());
        std::copy_n(found.begin(), std::min(size, count), changes);
        return true;
    });
    return count;
}

const char *ps_error(const ps_engine *engine) { return engine->error.c_str(); }

void ps_stop(ps_engine *engine) {
    if (getpid() == engine->owner) engine->engine.stop();
}

void ps_close(ps_engine *engine) {
    if (engine && getpid() == engine->owner) delete engine;
}

ps_status ps_fill(ps_engine *engine, int64_t start, int64_t stop, int64_t *brought) {
    return guarded(engine->error, [&] { return *brought = engine->engine.arena().fill({start, stop}), true; });
}

ps_status ps_fill_ready(ps_engine *engine, int64_t start, int64_t stop, int64_t *brought) {
    return guarded(engine->error, [&] {
        *brought = engine->engine.arena().fill_ready({start, stop}).value_or(-1);
        return true;
    });
}

ps_status ps_drop(ps_engine *engine, int64_t start, int64_t stop) {
    return guarded(engine->error, [&] { return engine->engine.arena().drop({start, stop}), true; });
}

ps_status ps_check(ps_engine *engine) {
    return guarded(engine->error, [&] { return engine->engine.arena().check(), true; });
}
