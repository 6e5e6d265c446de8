// The memory in which units come and go: runtime/sparse/units.py in C++, with readers of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>

#include "../failure.h"
#include "../files.h"
#include "../memory.h"
#include "residency.h"

namespace penstock {

// Passes belong to one thread at a time; `stop` and the numbers may be asked for by any.
class Pool {
  public:
    Pool(const Plan &plan, const Source &source, const ps_options &options);
    ~Pool();
    Pool(const Pool &) = delete;

    char *address(int storage) const;

    // Begins a pass; what a pass before has left unclear is dropped.
    void begin();

    // Notes all units that a step's read asks for, and cuts them into parts that fit: the place behind each.
    std::vector<int64_t> ask(int graph, int step, Numbers units);

    // Has the units of one part in memory until `release`; `alone` says that there is no other part. False where the
    // caller's patience ended: `wait` goes on. Raises PS_SOURCE where a unit cannot be read, which the next call reads
    // again.
    bool hold(int graph, int step, Numbers units, bool alone);
    bool wait();
    bool waits() const { return static_cast<bool>(then_); }
    void release(int graph, int step, Numbers units);

    // Ends the readers; a call that waits for units fails.
    void stop();

    ps_statistics statistics() const;
    const Reservation &memory() const { return memory_; }

    // What the last `hold` has dropped and brought.
    std::vector<ps_change> changes() const;

  private:
    // Pieces that several readers take in turn, for units and for granules at the edge of one.
    struct Batch {
        std::vector<Range> pieces;
        std::vector<int64_t> units, edges;
        size_t next = 0;
        int readers = 0;  // that have not come to its end
        int64_t nbytes = 0;
        std::optional<Sentence> error;
    };
    using Coming = std::shared_ptr<Batch>;
    using Batches = std::vector<Coming>;
    using OnTheirWay = std::unordered_map<int64_t, Coming>;

    void map();
    void refuse_closed() const;
    void start_over();
    void make_room(const Change &change);
    void give_back(const std::vector<int64_t> &units);
    void move_to(const std::vector<Brought> &units);
    void trim();
    void bring(const std::vector<Brought> &units);
    void start(const Coming &batch);
    void read();
    Batches wanted(const std::vector<int64_t> &units) const;
    bool wait_for(Batches batches, std::function<bool()> then);
    void settle(const Coming &batch);
    Ranges own(int64_t unit) const;
    std::optional<Range> inner(int64_t unit) const;
    void discard(Range place);
    void protect(Range place, int protection);

    const PoolPlan &plan_;
    const std::vector<Storage> &storages_;
    const Source &source_;
    const ps_options &options_;
    const bool moves_;
    Reservation memory_;
    FileRanges files_;
    Residency residency_;
    Change change_;
    OnTheirWay coming_, edges_;  // units, and granules at their edges that others may share
    Ranges spare_;               // memory of dropped units, still where they were, in the order they left
    bool unclear_ = false;
    Batches waited_;  // what a call that ran out of patience waits for, and what it does then
    std::function<bool()> then_;
    std::atomic<int64_t> moved_{0}, stall_ns_{0};

    mutable std::mutex lock_;
    std::mutex stopping_;  // one thread at a time joins the readers
    std::condition_variable work_, arrived_;
    std::deque<Coming> lanes_;  // a batch for each reader that is to join it
    std::vector<std::thread> readers_;
    size_t idle_ = 0;
    int reading_ = 0;
    bool closed_ = false;
};

}  // namespace penstock
