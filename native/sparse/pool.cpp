#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>

namespace penstock {

namespace {

// Readers of up to SOME pieces, and of more: a disk answers many small reads as fast as few.
constexpr size_t FEW = 4, MANY = 16, SOME = 128;

// Memory moves to the next unit in runs of so many bytes or more, as fresh memory is slower to fill.
constexpr int64_t MOVED = 256 << 10;

int64_t end_of(const PoolPlan &plan, const std::vector<Storage> &storages) {
    int64_t end = 0;
    for (size_t s = 0; s < storages.size(); ++s)
        if (plan.layout[s] >= 0) end = std::max(end, plan.layout[s] + storages[s].nbytes);
    return end;
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Pool::Pool(const Plan &plan, const Source &source, const ps_options &options)
    : plan_(*plan.pool),
      storages_(plan.storages),
      source_(source),
      options_(options),
      moves_(supports_move() && !options.debug),
      memory_(end_of(plan_, storages_)),
      files_(storages_, plan_.layout, plan_.layout, 0),
      residency_(plan_) {
    if (plan_.granule % PAGE)
        throw Failure(PS_PLAN, "the pool has granules of " + std::to_string(plan_.granule) +
                                   " bytes, and this system pages of " + std::to_string(PAGE) +
                                   ": make a plan on this machine");
    map();
}

Pool::~Pool() { stop(); }

void Pool::map() {
    memory_.map_anonymous(0, memory_.nbytes());
    std::vector<bool> whole(storages_.size(), false);
    // Huge pages take what they count for, and are given back as a whole, only where units begin and end at such.
    for (const UnitSteps &method : plan_.methods)
        for (const auto &[step, read] : method.reads)
            whole[read.storage] = (plan_.layout[read.storage] + read.offset) % HUGE_PAGE == 0 &&
                                  read.stride % HUGE_PAGE == 0 && read.nbytes % HUGE_PAGE == 0;
    for (size_t s = 0; s < storages_.size(); ++s) {
        if (plan_.layout[s] < 0) continue;
        const int64_t start = round_down(plan_.layout[s], plan_.granule);
        const int64_t stop = std::min(round_up(plan_.layout[s] + storages_[s].nbytes, plan_.granule), memory_.nbytes());
        hint(memory_.at(start), stop - start, whole[s] ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    if (options_.debug) protect({0, memory_.nbytes()}, PROT_NONE);
}

char *Pool::address(int storage) const {
    const int64_t place = plan_.layout[storage];
    return place < 0 ? nullptr : memory_.at(place);
}

void Pool::refuse_closed() const {
    std::lock_guard<std::mutex> guard(lock_);
    if (closed_) throw Failure(PS_STREAM, "the weights' memory has been closed; load the program again");
}

// On the caller's thread.

void Pool::begin() {
    if (unclear_) start_over();
    residency_.begin();
}

std::vector<int64_t> Pool::ask(int graph, int step, Numbers units) {
    const Table &table = residency_.table_of(graph, step);
    residency_.check(table, units);
    residency_.ask(graph, step, units);
    return residency_.parts(table, units);
}

bool Pool::hold(int graph, int step, Numbers units, bool alone) {
    refuse_closed();
    if (unclear_) throw Failure(PS_STREAM, "units are asked for in a pass of which a step has failed: begin another pass");
    const Table &table = residency_.table_of(graph, step);
    residency_.check(table, units);
    unclear_ = true;
    change_ = residency_.acquire(graph, step, units, alone);
    std::vector<int64_t> needed;
    for (const int64_t number : units) needed.push_back(table.first + number);
    Batches leaving;
    for (const int64_t unit : change_.drop)
        if (const auto found = coming_.find(unit); found != coming_.end()) leaving.push_back(found->second);
    return wait_for(std::move(leaving), [this, needed] {
        make_room(change_);
        bring(change_.bring);
        bring(change_.ahead);
        return wait_for(wanted(needed), [this] { return unclear_ = false, true; });
    });
}

void Pool::release(int graph, int step, Numbers units) {
    residency_.check(residency_.table_of(graph, step), units);
    residency_.release(graph, step, units);
}

bool Pool::wait() { return wait_for(std::exchange(waited_, {}), std::exchange(then_, nullptr)); }

// Returns once batches are there, and goes on with `then`; false where the caller's patience ends before.
bool Pool::wait_for(Batches batches, std::function<bool()> then) {
    std::sort(batches.begin(), batches.end());
    batches.erase(std::unique(batches.begin(), batches.end()), batches.end());
    const int64_t began = now_ns();
    bool there = batches.empty();
    if (!there) {
        std::unique_lock<std::mutex> guard(lock_);
        const auto come = [&] {
            return closed_ || std::all_of(batches.begin(), batches.end(), [](const Coming &one) { return !one->readers; });
        };
        if (options_.patience_ms)
            there = arrived_.wait_for(guard, std::chrono::milliseconds(options_.patience_ms), come);
        else
            arrived_.wait(guard, come), there = true;
        stall_ns_ += now_ns() - began;
    }
    if (!there) {
        waited_ = std::move(batches), then_ = std::move(then);
        return false;
    }
    refuse_closed();
    for (const Coming &one : batches) settle(one);
    return then();
}

// The batches that bring units, or bytes of others that lie in the granules at their edges.
Pool::Batches Pool::wanted(const std::vector<int64_t> &units) const {
    Batches found;
    const auto add = [&](const OnTheirWay &some, int64_t key) {
        if (const auto one = some.find(key); one != some.end()) found.push_back(one->second);
    };
    for (const int64_t unit : units) {
        const Granules edges = residency_.granules(unit);
        add(coming_, unit);
        add(edges_, edges.first);
        add(edges_, edges.stop - 1);
    }
    return found;
}

// Counts what a finished batch has brought. Raises its error, once all units are forgotten: others may share granules
// with those that did not come.
void Pool::settle(const Coming &batch) {
    if (batch->error) {
        start_over();
        throw Failure(*batch->error);
    }
    const auto forget = [&](OnTheirWay &some, const std::vector<int64_t> &keys) {
        for (const int64_t key : keys)
            if (const auto one = some.find(key); one != some.end() && one->second == batch) some.erase(one);
    };
    forget(coming_, batch->units);
    forget(edges_, batch->edges);
    moved_ += batch->nbytes;
}

// Drops every unit, once nothing is on its way, whatever a failure or an interrupt has left.
void Pool::start_over() {
    unclear_ = true;
    {
        std::unique_lock<std::mutex> guard(lock_);
        for (const OnTheirWay *const some : {&coming_, &edges_})
            for (const auto &[key, batch] : *some) batch->next = batch->pieces.size();
        lanes_.clear();
        arrived_.wait(guard, [this] { return !reading_; });
    }
    waited_.clear(), then_ = nullptr;
    coming_.clear(), edges_.clear(), spare_.clear();
    residency_.reset();
    discard({0, memory_.nbytes()});
    unclear_ = false;
}

// Bytes.

void Pool::make_room(const Change &change) {
    give_back(change.drop);
    move_to(change.bring);
    move_to(change.ahead);
    trim();
}

// Gives back the granules of units in which no unit that is held has bytes.
void Pool::give_back(const std::vector<int64_t> &units) {
    Ranges granules;
    for (const int64_t unit : units) {
        const auto kept = inner(unit);
        if (kept) spare_.push_back(*kept);
        for (const Range &one : subtract(own(unit), kept ? Ranges{*kept} : Ranges())) granules.push_back(one);
    }
    for (const Range &place : merged(granules)) discard(place);
}

// The granules of a dropped unit in which no unit that is held has bytes.
Ranges Pool::own(int64_t unit) const {
    const Granules edges = residency_.granules(unit);
    const int64_t last = edges.stop - 1, start = edges.first + residency_.in_use(edges.first);
    const int64_t stop = edges.stop - (last > edges.first && residency_.in_use(last));
    return start < stop ? Ranges{plan_.bytes({start, stop})} : Ranges();
}

// The granules that only this unit has bytes in, if they are many and may move.
std::optional<Range> Pool::inner(int64_t unit) const {
    const Granules edges = residency_.granules(unit);
    const Range found = plan_.bytes({edges.first + 1, edges.stop - 1});
    return moves_ && found.nbytes() >= MOVED ? std::optional<Range>(found) : std::nullopt;
}

// Gives units the memory of dropped ones of their size, which need not be zeroed and mapped again. A unit that was
// dropped itself keeps its own, so that no memory in use is ever taken for spare.
void Pool::move_to(const std::vector<Brought> &units) {
    for (const auto &[unit, granules] : units) {
        const auto to = inner(unit);
        if (!to) continue;
        const auto find = [&](auto fits) { return std::find_if(spare_.begin(), spare_.end(), fits); };
        auto found = find([&](const Range &one) { return one.start == to->start && one.stop == to->stop; });
        const bool stays = found != spare_.end();
        if (!stays) found = find([&](const Range &one) { return one.nbytes() == to->nbytes(); });
        if (found == spare_.end()) continue;
        const Range from = *found;
        spare_.erase(found);
        // Where no more mappings are allowed, fresh memory will do.
        if (!stays && !move_pages(memory_.at(from.start), memory_.at(to->start), to->nbytes())) discard(from);
    }
}

// Gives back what is spare beyond what the pool may hold beside its units.
void Pool::trim() {
    int64_t left = plan_.nbytes - residency_.held_bytes();
    Ranges kept;
    for (const Range &one : spare_) {
        left -= one.nbytes();
        if (left >= 0)
            kept.push_back(one);
        else
            discard(one);
    }
    spare_ = std::move(kept);
}

void Pool::discard(Range place) {
    const int64_t stop = std::min(place.stop, memory_.nbytes());
    drop_pages(memory_.at(place.start), stop - place.start);
    if (options_.debug) protect({place.start, stop}, PROT_NONE);
}

void Pool::protect(Range place, int protection) {
    const int64_t start = round_down(place.start, plan_.granule);
    const int64_t stop = std::min(round_up(place.stop, plan_.granule), memory_.nbytes());
    if (mprotect(memory_.at(start), stop - start, protection) != 0) refused(stop - start, "protected memory");
}

// Has readers read the granules of units, neighbours together. A granule that holds bytes of a unit in memory is not
// among them, and never read again: kernels may be reading it, and a read that is moved into place is wrong until it ends.
void Pool::bring(const std::vector<Brought> &units) {
    const auto batch = std::make_shared<Batch>();
    Ranges places;
    for (const auto &[unit, granules] : units) {
        if (granules.first >= granules.stop) continue;
        const int storage = residency_.table(unit).read.storage;
        const int64_t place = plan_.layout[storage];
        const Range whole = plan_.bytes(granules);
        places.push_back({std::max(whole.start, place), std::min(whole.stop, place + storages_[storage].nbytes)});
        batch->units.push_back(unit);
        batch->edges.push_back(granules.first);
        batch->edges.push_back(granules.stop - 1);
    }
    if (places.empty()) return;
    for (const Range &whole : merged(places)) {
        if (options_.debug) protect(whole, PROT_READ | PROT_WRITE);
        for (int64_t start = whole.start; start < whole.stop; start += PIECE)
            batch->pieces.push_back({start, std::min(start + PIECE, whole.stop)});
    }
    for (const int64_t unit : batch->units) coming_[unit] = batch;
    for (const int64_t edge : batch->edges) edges_[edge] = batch;
    start(batch);
}

// The readers' threads.

void Pool::start(const Coming &batch) {
    const size_t pieces = batch->pieces.size(), lanes = std::min(pieces, pieces <= SOME ? FEW : MANY);
    std::lock_guard<std::mutex> guard(lock_);
    if (closed_) return;  // which the caller finds when it waits
    try {
        while (idle_ < lanes_.size() + lanes && readers_.size() < MANY) {
            readers_.emplace_back([this] { read(); });
            ++idle_;
        }
    } catch (const std::system_error &) {
        if (readers_.empty())
            throw Failure(PS_STREAM, "the system refused a thread that reads weights: raise its limit (ulimit -u)");
    }
    batch->readers = static_cast<int>(lanes);
    lanes_.insert(lanes_.end(), lanes, batch);
    work_.notify_all();
}

void Pool::read() {
    std::unique_lock<std::mutex> guard(lock_);
    while (true) {
        work_.wait(guard, [this] { return closed_ || !lanes_.empty(); });
        if (closed_) return;
        const Coming batch = lanes_.front();
        lanes_.pop_front();
        --idle_, ++reading_;
        while (batch->next < batch->pieces.size() && !batch->error && !closed_) {
            const Range piece = batch->pieces[batch->next++];
            guard.unlock();
            int64_t nbytes = 0;
            std::optional<Sentence> error;
            try {
                files_.within(piece, [&](const FileRange &one) {
                    source_.read(one.file, one.file_offset, memory_.at(one.place), one.range.nbytes());
                    nbytes += one.range.nbytes();
                });
            } catch (...) {
                error = caught();
            }
            guard.lock();
            batch->nbytes += nbytes;
            if (error && !batch->error) batch->error = std::move(error);
        }
        ++idle_, --reading_, --batch->readers;
        arrived_.notify_all();
    }
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        closed_ = true;
    }
    work_.notify_all();
    arrived_.notify_all();
    std::lock_guard<std::mutex> guard(stopping_);
    for (std::thread &one : readers_) one.join();
    readers_.clear();
}

// Numbers.

ps_statistics Pool::statistics() const {
    ps_statistics found{};
    found.bytes_moved = found.bytes_read = moved_;
    found.stall_ns = stall_ns_;
    found.held_bytes = residency_.held_bytes(), found.peak_bytes = residency_.peak_bytes();
    return found;
}

std::vector<ps_change> Pool::changes() const {
    std::vector<ps_change> found;
    const auto add = [&](ps_changed kind, int64_t unit, Granules some) {
        found.push_back({kind, residency_.table(unit).read.storage, residency_.number(unit), some.first, some.stop});
    };
    for (const int64_t unit : change_.drop) add(PS_DROPPED, unit, {0, 0});
    for (const auto &[unit, some] : change_.bring) add(PS_BROUGHT, unit, some);
    for (const auto &[unit, some] : change_.ahead) add(PS_AHEAD, unit, some);
    return found;
}

}  // namespace penstock
