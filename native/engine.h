// The state machine of docs/payload.md, "Executing a plan": readers fill the arena ahead of the steps that read it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "arena.h"
#include "failure.h"
#include "sparse/pool.h"

namespace penstock {

class Engine {
  public:
    Engine(const char *payload, const char *plan, const char *folder, const ps_options &options);
    ~Engine();

    // These return false where the caller's patience ended: `wait` goes on. All raise Failure.
    bool begin(int graph);
    bool acquire(int graph, int step);
    bool end(int graph);
    bool wait();

    bool probe(int graph, int call);

    bool release(int graph, int step);
    void abort();
    void stop();

    // Reads a storage that is not in the arena. From any number of threads.
    void fetch(int storage, char *address) const;

    const Plan &plan() const { return plan_; }
    char *address(int storage) const { return arena_->address(storage); }
    Arena &arena() const { return *arena_; }
    ps_statistics statistics() const;

    // The memory of what is read by units. Raises PS_PLAN where the plan has no pool.
    Pool &units() const;
    Pool *pool() const { return pool_.get(); }

  private:
    // Which piece is issued next, and how far the pass is. A piece is `ahead` when it is for the pass after the one
    // whose steps are counted by `ended`. `left` and `left_ahead` count, by step, the pieces that have not come.
    struct Position {
        const Method *method = nullptr, *expected = nullptr;  // the pass that runs or ran, and the queue's
        std::shared_ptr<const Queue> first;  // of a first pass, which no method holds
        const Queue *queue = nullptr;
        std::shared_ptr<std::vector<int>> left, left_ahead;
        size_t index = 0;
        bool ahead = true;
        int ended = 0;

        void begin(const Method &method, const Method &following);
        bool may_start(size_t index) const;
        void turn(const Method &following);
    };

    struct Taken {
        std::vector<Piece> pieces;
        std::shared_ptr<std::vector<int>> left;
    };

    const Method &method(int graph) const;
    const Method &following(const Method &method) const { return plan_.methods[method.following]; }
    void check();
    bool is_clear_for(const Method &method) const;
    void start_over(const Method &method);
    void drain();
    void restart(const Method &method);
    void forget_pass();
    bool is_closed() const;
    void refuse_failed() const;
    void leave(const Method &method, int step);
    void take(const Ranges &ranges);
    void load_on_demand(const Ranges &needed);
    void read();
    bool take(Taken &taken);
    void wake_reader();
    bool startable() const;
    void drop_ended();
    void fill_ready();
    bool wait_for(std::function<bool()> done);

    const ps_options options_;
    const Plan plan_;
    const Source source_;
    const std::unique_ptr<Arena> arena_;
    const std::unique_ptr<Pool> pool_;  // null where nothing is read by units

    mutable std::mutex lock_;
    std::mutex stopping_;  // one thread at a time joins the readers
    std::condition_variable work_, arrived_;
    Position position_;
    std::vector<std::thread> readers_;
    std::vector<int> expected_;     // the probed steps still to come in this pass, the next one last
    std::optional<Ranges> demand_;  // what was loaded, once this pass left the planned order
    Ranges dropping_;               // what ended steps have dropped while nothing needs its room
    std::function<bool()> waited_;  // what a call that ran out of patience waits for
    std::function<void()> arrived_then_;
    std::optional<Sentence> error_;
    int in_flight_ = 0;
    bool running_ = false, paused_ = false, closed_ = false, resident_loaded_ = false;
    int64_t checked_ns_ = 0, bytes_moved_ = 0, bytes_read_ = 0, misses_ = 0, stall_ns_ = 0, bytes_written_ = 0;
};

}  // namespace penstock
