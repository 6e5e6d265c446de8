// Which units are in a pool, and which of them leave when others need room: schedule/sparse/residency.py, which says why,
// decision by decision. Both compute with the same additions, products and divisions of doubles in the same order.
#pragma once

#include <atomic>
#include <map>
#include <unordered_map>
#include <vector>

#include "units.h"

namespace penstock {

// The numbers of units, ascending.
struct Numbers {
    const int64_t *first;
    int64_t count;
    const int64_t *begin() const { return first; }
    const int64_t *end() const { return first + count; }
};

// A unit that comes, and the granules that have to be read for it.
struct Brought {
    int64_t unit;
    Granules granules;
};

// What has to happen before a read: units to drop first, then units to bring, and to bring ahead of need. Units are
// counted from table to table.
struct Change {
    std::vector<int64_t> drop;
    std::vector<Brought> bring, ahead;
};

// A storage whose units are in the pool; `first` is the number of its first unit among those of all tables.
struct Table {
    UnitRead read;
    int64_t first;
};

class Residency {
  public:
    explicit Residency(const PoolPlan &pool);

    // Raises PS_STREAM for a step without a read that the pool serves, and for units that its storage does not have.
    const Table &table_of(int graph, int step) const;
    void check(const Table &table, Numbers numbers) const;

    // The table of a unit, and what it is there.
    const Table &table(int64_t unit) const { return tables_[table_[unit]]; }
    int64_t number(int64_t unit) const { return unit - table(unit).first; }
    Granules granules(int64_t unit) const { return pool_.granules(table(unit).read, number(unit)); }

    // Cuts the units of one read into runs of which each fits into the pool: the place behind each among `numbers`.
    std::vector<int64_t> parts(const Table &table, Numbers numbers) const;

    void begin();
    void ask(int graph, int step, Numbers numbers);
    Change acquire(int graph, int step, Numbers numbers, bool alone);
    void release(int graph, int step, Numbers numbers);
    void reset();
    bool in_use(int64_t granule) const { return users_.count(granule) > 0; }

    int64_t held_bytes() const { return held_bytes_; }
    int64_t peak_bytes() const { return peak_bytes_; }

  private:
    struct Read {
        size_t table;
        int turn;
        std::vector<size_t> behind;  // the tables of the turn's later reads
    };
    struct Method {
        std::map<int, Read> reads;               // by step
        std::vector<std::vector<int64_t>> until;  // by turn: how many turns come until each table is read
    };
    using Flags = std::vector<char>;

    void add_method(const UnitSteps &steps, const std::map<int, size_t> &places);
    void find_partners();
    const Read &read(int graph, int step) const;
    void admit(const std::vector<int64_t> &missing, const std::vector<int64_t> &until, Change &change, bool needed);
    std::vector<int64_t> leaving(int64_t unit) const;
    std::vector<int64_t> by_key(const std::vector<int64_t> &until, bool needed) const;
    double key(int64_t unit, const std::vector<int64_t> &until, double between) const;
    std::vector<int64_t> missing(size_t table, Numbers numbers) const;
    Granules own(int64_t unit) const;
    int64_t cost(int64_t unit) const;
    Granules take(int64_t unit);
    void drop(int64_t unit);

    const PoolPlan &pool_;
    const std::vector<double> quick_powers_, slow_powers_;
    std::vector<Table> tables_;
    std::map<int, Method> methods_;
    std::vector<std::vector<size_t>> partners_;  // by table: others of which the same turns ask for the same units
    std::vector<int> table_;                     // by unit, as what follows
    std::vector<double> quick_, slow_;
    std::vector<int64_t> seen_;   // the read of its table at which a unit was noted
    Flags held_, used_, soon_;    // in the pool, used by the read in progress, and by later reads or parts of the turn
    std::vector<int64_t> turns_;  // by table: how often it was read
    std::unordered_map<int64_t, int> users_;  // units held in granules at the edge of a unit
    std::atomic<int64_t> held_bytes_{0}, peak_bytes_{0};
};

}  // namespace penstock
