#include "residency.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "../failure.h"

namespace penstock {

namespace {

constexpr double QUICK = 0.5, SLOW = 0x1.f50765b6e4540p-1;  // half-lives of 1 and 32 turns
constexpr int64_t FORGOTTEN = 2048;  // turns after which a unit's weight counts as after so many
constexpr double LEAST_CHANCE = 1e-12;

// The powers of a number as products: the functions of mathematical libraries differ in last bits.
std::vector<double> powers(double base) {
    std::vector<double> found{1.0};
    for (int64_t k = 0; k < FORGOTTEN; ++k) found.push_back(found.back() * base);
    return found;
}

double faded(const std::vector<double> &powers, int64_t turns) { return powers[std::min(turns, FORGOTTEN)]; }

}  // namespace

Residency::Residency(const PoolPlan &pool) : pool_(pool), quick_powers_(powers(QUICK)), slow_powers_(powers(SLOW)) {
    std::map<int, UnitRead> reads;
    for (const UnitSteps &method : pool.methods)
        for (const auto &[step, one] : method.reads) reads.insert_or_assign(one.storage, one);
    std::map<int, size_t> places;
    int64_t units = 0;
    for (const auto &[storage, one] : reads) {
        places[storage] = tables_.size();
        const double share = static_cast<double>(std::max<int64_t>(1, one.asked)) /
                             static_cast<double>(std::max<int64_t>(1, one.count));
        table_.insert(table_.end(), one.count, static_cast<int>(tables_.size()));
        quick_.insert(quick_.end(), one.count, std::min(share, 1.0));
        tables_.push_back({one, units});
        units += one.count;
    }
    slow_ = quick_;
    seen_.resize(units);
    held_.resize(units), used_.resize(units), soon_.resize(units);
    turns_.resize(tables_.size());
    for (const UnitSteps &method : pool.methods) add_method(method, places);
    find_partners();
}

void Residency::add_method(const UnitSteps &steps, const std::map<int, size_t> &places) {
    Method &method = methods_[steps.graph];
    std::map<int64_t, int> turns;
    for (auto one = steps.reads.begin(); one != steps.reads.end(); ++one) {
        const UnitRead &now = one->second;
        Read read{places.at(now.storage), turns.emplace(now.route, static_cast<int>(turns.size())).first->second, {}};
        for (auto later = std::next(one); later != steps.reads.end(); ++later) {
            const UnitRead &other = later->second;
            if (other.route == now.route && other.storage != now.storage && other.count == now.count)
                read.behind.push_back(places.at(other.storage));
        }
        method.reads[one->first] = read;
    }
    const int64_t count = std::max<int64_t>(1, static_cast<int64_t>(turns.size()));
    method.until.assign(count, std::vector<int64_t>(tables_.size(), count));
    for (const auto &[step, one] : method.reads)
        for (int64_t now = 0; now < count; ++now) {
            const int64_t distance = (one.turn - now + count) % count;
            int64_t &least = method.until[now][one.table];
            least = std::min(least, distance ? distance : count);
        }
}

void Residency::find_partners() {
    std::vector<std::set<std::tuple<int, int, int64_t>>> turns(tables_.size());
    std::vector<size_t> order;  // of tables, as methods read them first
    for (const UnitSteps &method : pool_.methods)
        for (const auto &[step, one] : methods_.at(method.graph).reads) {
            if (turns[one.table].empty()) order.push_back(one.table);
            turns[one.table].emplace(method.graph, one.turn, tables_[one.table].read.count);
        }
    partners_.resize(tables_.size());
    for (size_t table = 0; table < tables_.size(); ++table)
        for (const size_t other : order)
            if (other != table && turns[other] == turns[table]) partners_[table].push_back(other);
}

const Residency::Read &Residency::read(int graph, int step) const {
    const auto method = methods_.find(graph);
    if (method != methods_.end()) {
        const auto found = method->second.reads.find(step);
        if (found != method->second.reads.end()) return found->second;
    }
    throw Failure(PS_STREAM, "step " + std::to_string(step) + " of graph " + std::to_string(graph) +
                                 " reads no units that the pool of the plan has: plan it again");
}

const Table &Residency::table_of(int graph, int step) const { return tables_[read(graph, step).table]; }

void Residency::check(const Table &table, Numbers numbers) const {
    int64_t last = -1;
    for (const int64_t number : numbers) {
        if (number <= last || number >= table.read.count)
            throw Failure(PS_STREAM, "unit " + std::to_string(number) + " is asked for behind unit " + std::to_string(last) +
                                         " of storage " + std::to_string(table.read.storage) + ", which has " +
                                         std::to_string(table.read.count) + ": name each once, ascending");
        last = number;
    }
}

std::vector<int64_t> Residency::parts(const Table &table, Numbers numbers) const {
    std::vector<int64_t> ends;
    int64_t taken = 0, last = -1;
    for (int64_t k = 0; k < numbers.count; ++k) {
        const Granules some = pool_.granules(table.read, numbers.first[k]);
        int64_t more = (some.stop - std::max(some.first, last)) * pool_.granule;
        if (ends.empty() || taken + more > pool_.nbytes) {
            ends.push_back(k);
            taken = 0, more = (some.stop - some.first) * pool_.granule;
        }
        ends.back() = k + 1;
        taken += more, last = some.stop;
    }
    return ends;
}

void Residency::begin() {
    std::fill(used_.begin(), used_.end(), 0);
    std::fill(soon_.begin(), soon_.end(), 0);
}

void Residency::ask(int graph, int step, Numbers numbers) {
    const Read &one = read(graph, step);
    std::fill(soon_.begin(), soon_.end(), 0);
    for (const int64_t number : numbers) {
        soon_[tables_[one.table].first + number] = 1;
        for (const size_t table : one.behind) soon_[tables_[table].first + number] = 1;
    }
    const int64_t now = ++turns_[one.table];
    for (const int64_t number : numbers) {
        const int64_t unit = tables_[one.table].first + number, passed = now - seen_[unit];
        quick_[unit] = quick_[unit] * faded(quick_powers_, passed) + 1 - QUICK;
        slow_[unit] = slow_[unit] * faded(slow_powers_, passed) + 1 - SLOW;
        seen_[unit] = now;
    }
}

Change Residency::acquire(int graph, int step, Numbers numbers, bool alone) {
    const Read &one = read(graph, step);
    for (const int64_t number : numbers) {
        const int64_t unit = tables_[one.table].first + number;
        used_[unit] = 1, soon_[unit] = 0;
    }
    Change change;
    const std::vector<int64_t> &until = methods_.at(graph).until[one.turn];
    admit(missing(one.table, numbers), until, change, true);
    if (alone)
        for (const size_t table : one.behind) admit(missing(table, numbers), until, change, false);
    return change;
}

void Residency::release(int graph, int step, Numbers numbers) {
    for (const int64_t number : numbers) used_[table_of(graph, step).first + number] = 0;
}

void Residency::reset() {
    begin();
    std::fill(held_.begin(), held_.end(), 0);
    users_.clear();
    held_bytes_ = 0;
}

std::vector<int64_t> Residency::missing(size_t table, Numbers numbers) const {
    std::vector<int64_t> found;
    for (const int64_t number : numbers)
        if (const int64_t unit = tables_[table].first + number; !held_[unit]) found.push_back(unit);
    return found;
}

// Makes room for missing units, one after another, and counts them as held.
void Residency::admit(const std::vector<int64_t> &missing, const std::vector<int64_t> &until, Change &change, bool needed) {
    std::vector<int64_t> order;
    size_t next = 0;
    bool ordered = false;
    for (const int64_t unit : missing) {
        while (held_bytes_ + cost(unit) > pool_.nbytes) {
            if (!std::exchange(ordered, true)) order = by_key(until, needed);
            while (next < order.size() && !held_[order[next]]) ++next;
            if (next == order.size()) {
                if (needed) throw Failure(PS_STREAM, "the units of one read do not fit into their pool: plan it again");
                return;
            }
            for (const int64_t one : leaving(order[next++])) {
                drop(one);
                change.drop.push_back(one);
            }
        }
        (needed ? change.bring : change.ahead).push_back({unit, take(unit)});
    }
}

// A unit, and the units that are asked for whenever it is, as far as they are held and not in use.
std::vector<int64_t> Residency::leaving(int64_t unit) const {
    std::vector<int64_t> found{unit};
    for (const size_t other : partners_[table_[unit]]) {
        const int64_t one = tables_[other].first + number(unit);
        if (held_[one] && !used_[one] && !soon_[one]) found.push_back(one);
    }
    return found;
}

// The units that may leave, the one first that is expected to be asked for last. Behind all others, and only for units
// that are needed now, those that this turn will ask for.
std::vector<int64_t> Residency::by_key(const std::vector<int64_t> &until, bool needed) const {
    const auto most = std::max_element(until.begin(), until.end());
    const auto between = static_cast<double>(most == until.end() ? 1 : std::max<int64_t>(*most, 1));
    std::vector<std::pair<double, int64_t>> some;
    for (int64_t unit = 0; unit < static_cast<int64_t>(held_.size()); ++unit)
        if (held_[unit] && !used_[unit] && (needed || !soon_[unit])) some.emplace_back(key(unit, until, between), unit);
    std::stable_sort(some.begin(), some.end(), [](const auto &a, const auto &b) { return a.first > b.first; });
    std::vector<int64_t> found;
    for (const auto &one : some) found.push_back(one.second);
    return found;
}

// The turns until a unit is expected to be asked for. It depends on what was asked for, and never on what is held.
double Residency::key(int64_t unit, const std::vector<int64_t> &until, double between) const {
    if (soon_[unit]) return 0;
    const int64_t passed = turns_[table_[unit]] - seen_[unit];
    const double chance = (quick_[unit] * faded(quick_powers_, passed) + 7 * (slow_[unit] * faded(slow_powers_, passed))) / 8;
    return static_cast<double>(until[table_[unit]]) + between * (1 / std::max(chance, LEAST_CHANCE) - 1);
}

// The granules of a unit in which no held unit has bytes.
Granules Residency::own(int64_t unit) const {
    const Granules edges = granules(unit);
    const int64_t last = edges.stop - 1;
    return {edges.first + in_use(edges.first), edges.stop - (last > edges.first && in_use(last))};
}

int64_t Residency::cost(int64_t unit) const {
    const Granules some = own(unit);
    return (some.stop - some.first) * pool_.granule;
}

// Counts a unit as held, and returns the granules that it adds.
Granules Residency::take(int64_t unit) {
    const Granules added = own(unit), edges = granules(unit);
    held_bytes_ += cost(unit);
    peak_bytes_ = std::max(peak_bytes_.load(), held_bytes_.load());
    for (const int64_t granule : std::set<int64_t>{edges.first, edges.stop - 1}) ++users_[granule];
    held_[unit] = 1;
    return added;
}

void Residency::drop(int64_t unit) {
    const Granules edges = granules(unit);
    for (const int64_t granule : std::set<int64_t>{edges.first, edges.stop - 1})
        if (!--users_[granule]) users_.erase(granule);
    held_[unit] = 0;
    held_bytes_ -= cost(unit);
}

}  // namespace penstock
