#include "engine.h"

#include <chrono>

namespace penstock {

namespace {

constexpr int64_t CHECK_EVERY_NS = 5'000'000;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

std::shared_ptr<std::vector<int>> copy_of(const std::vector<int> &counts) {
    return std::make_shared<std::vector<int>>(counts);
}

}  // namespace

void Engine::Position::begin(const Method &next, const Method &following) {
    if (expected != &next) {
        expected = &next;
        queue = &next.steady;
        left_ahead = copy_of(next.steady.counts);
    }
    method = &next;
    left = left_ahead;
    left_ahead = copy_of(following.steady.counts);
    ahead = false;
    ended = 0;
    turn(following);
}

// Whether the step that a piece waits for has ended.
bool Engine::Position::may_start(size_t at) const {
    if (at >= queue->pieces.size()) return false;
    const int after = queue->pieces[at].after;
    return ahead ? after < 0 && after + method->steps() < ended : after < ended;
}

void Engine::Position::turn(const Method &following) {
    if (!ahead && index >= queue->pieces.size()) {
        expected = &following;
        queue = &following.steady;
        index = 0;
        ahead = true;
    }
}

Engine::Engine(const char *payload, const char *plan, const char *folder, const ps_options &options)
    : options_(options),
      plan_(read_plan(payload, plan)),
      source_(plan_, folder, options),
      arena_(open_arena(plan_, source_, options_)),
      pool_(plan_.pool ? std::make_unique<Pool>(plan_, source_, options_) : nullptr) {
    if (options.readers < 1) throw Failure(PS_STREAM, "expected one reader or more: somebody has to read weights");
    restart(plan_.methods.front());
    try {
        for (int k = 0; k < options.readers; ++k) readers_.emplace_back([this] { read(); });
    } catch (const std::system_error &) {
        stop();
        throw Failure(PS_STREAM, "the system refused a thread that reads weights: raise its limit (ulimit -u)");
    } catch (...) {
        stop();
        throw;
    }
}

Engine::~Engine() { stop(); }

void Engine::stop() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        closed_ = true;
    }
    work_.notify_all();
    arrived_.notify_all();
    if (pool_) pool_->stop();
    std::lock_guard<std::mutex> guard(stopping_);
    for (std::thread &one : readers_) one.join();
    readers_.clear();
}

Pool &Engine::units() const {
    if (!pool_) throw Failure(PS_PLAN, "the plan has no pool: nothing of it is read by units");
    return *pool_;
}

ps_statistics Engine::statistics() const {
    ps_statistics result{};
    std::lock_guard<std::mutex> guard(lock_);
    result.bytes_moved = bytes_moved_;
    result.bytes_read = bytes_read_;
    result.misses = misses_;
    result.stall_ns = stall_ns_;
    result.bytes_written = bytes_written_;
    arena_->sizes(&result.held_bytes, &result.peak_bytes);
    return result;
}

const Method &Engine::method(int graph) const {
    const Method *const found = plan_.method(graph);
    if (!found) throw Failure(PS_STREAM, "the plan has no schedule for graph " + std::to_string(graph));
    return *found;
}

// The pass, on the caller's thread.

bool Engine::begin(int graph) {
    const Method &next = method(graph);
    check();
    if (pool_) pool_->begin();
    if (!is_clear_for(next)) {
        if (next.continues)
            throw Failure(PS_STREAM, "the values that a call has kept for its backward are not in memory any more, "
                                     "because another call came between or one failed: call the module again");
        start_over(next);
    }
    {
        std::lock_guard<std::mutex> guard(lock_);
        position_.begin(next, following(next));
        expected_.assign(next.probed.rbegin(), next.probed.rend());
        running_ = true;
        fill_ready();
    }
    const auto left = position_.left;
    const int n = next.steps();
    arrived_then_ = [this] { resident_loaded_ = true; };
    return wait_for([left, n] { return !(*left)[n]; });
}

bool Engine::acquire(int graph, int step) {
    if (now_ns() - checked_ns_ > CHECK_EVERY_NS) check();
    const Method &now = method(graph);
    if (step < 0 || step >= now.steps()) throw Failure(PS_STREAM, "there is no step " + std::to_string(step));
    if (demand_ || expected_.empty() || expected_.back() != step) {
        if (plan_.keeps)
            throw Failure(PS_STREAM, "step " + std::to_string(step) + " of graph " + std::to_string(graph) +
                                         " came out of turn, and what a forward has kept for its backward would be "
                                         "lost: compile with spill=False");
        load_on_demand(now.needs[step]);
        return true;
    }
    if (!now.takes[step].empty()) arrived_then_ = [this, &now, step] { take(now.takes[step]); };
    const auto left = position_.left;
    return wait_for([left, step] { return !(*left)[step]; });
}

bool Engine::probe(int graph, int call) {
    const Method &now = method(graph);
    const auto ended = now.closes.find(call), begun = now.opens.find(call);
    if (ended != now.closes.end())
        for (bool done = release(graph, ended->second); !done;) done = wait();
    return begun == now.opens.end() || acquire(graph, begun->second);
}

bool Engine::release(int graph, int step) {
    if (demand_) return true;
    if (expected_.empty() || expected_.back() != step)
        throw Failure(PS_STREAM, "step " + std::to_string(step) + " of graph " + std::to_string(graph) +
                                     " was released without being acquired");
    const Method &now = method(graph);
    const int mark = now.steps() + 1 + step;
    if (!now.steady.counts[mark]) {
        leave(now, step);
        return true;
    }
    arrived_then_ = [this, &now, step] { leave(now, step); };
    const auto left = position_.left;
    return wait_for([left, mark] { return !(*left)[mark]; });
}

// Notes that a step has ended, and drops what the plan drops with it.
void Engine::leave(const Method &now, int step) {
    expected_.pop_back();
    const Ranges &drops = now.drops[step];
    dropping_.insert(dropping_.end(), drops.begin(), drops.end());
    std::lock_guard<std::mutex> guard(lock_);
    position_.ended = step + 1;
    if (options_.drop_early || startable()) drop_ended();
    fill_ready();
}

// Gives memory to what the step that begins writes.
void Engine::take(const Ranges &ranges) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        drop_ended();
    }
    for (const Range &range : ranges) arena_->take(range);
}

bool Engine::end(int graph) {
    check();  // what was read in this pass is what the files still hold
    if (demand_ || !expected_.empty()) {
        abort();
        return true;
    }
    {
        std::lock_guard<std::mutex> guard(lock_);
        position_.ended = method(graph).steps();
        running_ = false;
        drop_ended();
        fill_ready();
    }
    if (!plan_.barrier) return true;
    return wait_for([this] { return !startable() && !in_flight_; });
}

void Engine::abort() {
    waited_ = nullptr, arrived_then_ = nullptr;
    if (!is_closed()) start_over(*position_.method);
}

void Engine::fetch(int storage, char *address) const {
    if (storage < 0 || storage >= static_cast<int>(plan_.storages.size()))
        throw Failure(PS_STREAM, "there is no storage " + std::to_string(storage));
    for (const Extent &one : plan_.storages[storage].extents)
        source_.read(one.file, one.file_offset, address + one.storage_offset, one.nbytes);
}

// Between passes.

// Whether the pass before has ended as planned, and what is on its way serves a pass of this method.
bool Engine::is_clear_for(const Method &next) const {
    std::lock_guard<std::mutex> guard(lock_);
    if (running_ || paused_ || error_) return false;
    if (position_.expected == &next) return true;
    // A first pass's queue brings the boundary, which the other method's steady one would not.
    const bool crossing = next.crosses_calls || position_.method->crosses_calls;
    return !crossing && position_.index == 0 && position_.queue == &following(*position_.method).steady;
}

void Engine::start_over(const Method &next) {
    drain();
    restart(next);
}

// Issues nothing more, waits for what is being read, and drops all but the resident ranges.
void Engine::drain() {
    {
        std::unique_lock<std::mutex> guard(lock_);
        paused_ = true;
        arrived_.wait(guard, [this] { return !in_flight_; });
    }
    dropping_.clear();
    const Ranges kept = resident_loaded_ ? merged(plan_.resident) : Ranges();
    for (const Range &range : subtract(plan_.segments, kept)) arena_->drop(range);
}

void Engine::restart(const Method &next) {
    std::lock_guard<std::mutex> guard(lock_);
    Position position;
    position.method = position.expected = &next;
    position.first = std::make_shared<const Queue>(plan_.first_pass(next, resident_loaded_));
    position.queue = position.first.get();
    position.left_ahead = copy_of(position.queue->counts);
    position.ended = next.steps();
    position_ = position;
    forget_pass();
    error_.reset();
    paused_ = false;
    wake_reader();
}

void Engine::forget_pass() {
    expected_.clear();
    demand_.reset();
    running_ = false;
}

// Drops whatever else streams, then loads what a step needs before it returns.
void Engine::load_on_demand(const Ranges &needed) {
    refuse_failed();
    if (!demand_)
        drain();
    else
        for (const Range &range : *demand_) arena_->drop(range);
    demand_ = needed;
    const int64_t began = now_ns();
    int64_t moved = 0;
    for (const Range &range : needed) moved += arena_->fill(range);
    std::lock_guard<std::mutex> guard(lock_);
    bytes_moved_ += moved;
    stall_ns_ += now_ns() - began;
    ++misses_;
}

// The readers' threads.

void Engine::read() {
    Taken taken;
    while (true) {
        std::optional<Sentence> error;
        int64_t moved = 0, written = 0;
        taken.left = nullptr;
        try {
            if (!take(taken)) return;
            for (const Piece &piece : taken.pieces)
                (piece.out ? written : moved) += piece.out ? arena_->write_out(piece.range) : arena_->fill(piece.range);
        } catch (...) {
            error = caught();
        }
        std::lock_guard<std::mutex> guard(lock_);
        if (taken.left) --in_flight_;
        bytes_moved_ += moved;
        bytes_read_ += moved;
        bytes_written_ += written;
        if (!error)
            for (const Piece &piece : taken.pieces) --(*taken.left)[piece.mark];
        else if (!error_)
            error_ = std::move(error);
        arrived_.notify_all();
    }
}

// Waits until a piece may start; `left` stays null where that fails. Small pieces of one pass that may all start are taken
// together.
bool Engine::take(Taken &taken) {
    std::unique_lock<std::mutex> guard(lock_);
    work_.wait(guard, [this] { return closed_ || startable(); });
    if (closed_) return false;
    taken.pieces.clear();
    int64_t nbytes = 0;
    while (position_.may_start(position_.index)) {
        const Piece &piece = position_.queue->pieces[position_.index];
        nbytes += piece.range.nbytes();
        if (nbytes > PIECE && !taken.pieces.empty()) break;
        taken.pieces.push_back(piece);
        ++position_.index;
    }
    taken.left = position_.ahead ? position_.left_ahead : position_.left;
    ++in_flight_;
    position_.turn(following(*position_.method));
    wake_reader();
    return true;
}

// Wakes one reader if a piece may start, which wakes the next.
void Engine::wake_reader() {
    if (startable()) work_.notify_one();
}

bool Engine::startable() const { return !paused_ && !error_ && position_.may_start(position_.index); }

// On the caller's thread, beside the pass.

void Engine::drop_ended() {
    for (const Range &range : merged(dropping_)) arena_->drop(range);
    dropping_.clear();
}

// Fills the pieces that need no waiting, which is faster than waking a reader; leaves the others.
void Engine::fill_ready() {
    while (startable()) {
        const std::vector<Piece> &pieces = position_.queue->pieces;
        const size_t first = position_.index;
        size_t end = first + 1;
        if (pieces[first].out) return wake_reader();
        while (position_.may_start(end) && !pieces[end].out &&
               pieces[end].range.start == pieces[end - 1].range.stop)
            ++end;
        const auto moved = arena_->fill_ready({pieces[first].range.start, pieces[end - 1].range.stop});
        if (!moved) return wake_reader();
        std::vector<int> &left = position_.ahead ? *position_.left_ahead : *position_.left;
        for (size_t k = first; k < end; ++k) --left[pieces[k].mark];
        bytes_moved_ += *moved;
        position_.index = end;
        position_.turn(following(*position_.method));
    }
}

void Engine::check() {
    arena_->check();
    checked_ns_ = now_ns();
}

bool Engine::wait() {
    if (pool_ && pool_->waits()) return pool_->wait();
    if (!waited_) return true;
    return wait_for(waited_);
}

bool Engine::wait_for(std::function<bool()> done) {
    const int64_t began = now_ns();
    bool patient = true;
    {
        std::unique_lock<std::mutex> guard(lock_);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(options_.patience_ms);
        while (!done() && !error_ && !closed_ && patient) {
            if (!in_flight_ && !startable())
                throw Failure(PS_STREAM,
                              "what is waited for needs a transfer that waits for a later step: plan it again");
            if (options_.patience_ms)
                patient = arrived_.wait_until(guard, deadline) == std::cv_status::no_timeout;
            else
                arrived_.wait(guard);
        }
        stall_ns_ += now_ns() - began;
        patient = patient || done() || error_ || closed_;
    }
    if (!patient) {
        waited_ = std::move(done);
        return false;
    }
    waited_ = nullptr;
    const auto then = std::exchange(arrived_then_, nullptr);
    refuse_failed();
    if (then) then();
    return true;
}

bool Engine::is_closed() const {
    std::lock_guard<std::mutex> guard(lock_);
    return closed_;
}

void Engine::refuse_failed() const {
    std::lock_guard<std::mutex> guard(lock_);
    if (error_) throw Failure(*error_);
    if (closed_) throw Failure(PS_STREAM, "the streamed module was closed while it ran");
}

}  // namespace penstock
