// Streams of the rig: each is a thread that runs operations in order, as early or as late as a policy says.
//
// An operation is a kernel, a copy, or a wait for a mark of another stream. A mark is a stream and a position in it;
// it is reached once so many operations of that stream are done. Whoever waits for a mark demands it. What a policy
// keeps back runs only once it is demanded, and then no further than the mark: so late is as late as is legal.
//
// A mark also tells a time, which no policy and no busy machine changes: an operation takes a millisecond, and begins
// when the one before it on its stream has ended, or what it waits for if that is later.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace rig {

constexpr int kDevices = 2;
constexpr int kPooled = 32;  // streams of each priority that a device hands out in turn, as CUDA's devices do

struct Stream;

struct Mark {
  Stream* stream = nullptr;
  uint64_t position = 0;
  uint64_t milliseconds = 0;
};

struct Operation {
  std::function<void()> run;  // empty for a wait
  Mark after;
};

struct Stream {
  Stream(int device, int id) : device(device), id(id) {}

  bool idle() const { return done == enqueued; }

  int device, id;  // id 0 is the default stream, then come the pool's, then those of high priority
  std::deque<Operation> waiting;
  uint64_t enqueued = 0, done = 0;
  uint64_t milliseconds = 0;  // at which the last operation enqueued ends
  uint64_t demanded = 0;  // may run up to here under any policy
  uint64_t released = 0;  // may run up to here under the random policy
  bool started = false;
  std::condition_variable woken;  // its thread waits for this
};

enum class Policy { soon, late, random, lagging };

// All streams of all devices. One mutex guards everything; operations run outside it.
class Streams {
 public:
  Streams() {
    for (int device = 0; device < kDevices; device++)
      for (int id = 0; id <= 2 * kPooled; id++) streams_.push_back(std::make_unique<Stream>(device, id));
  }

  Stream* of(int device, int64_t id) { return streams_.at(device * (2 * kPooled + 1) + id).get(); }

  Stream* next_pooled(int device, bool high_priority) {
    std::lock_guard lock(mutex_);
    int& next = next_[2 * device + high_priority];
    return of(device, 1 + high_priority * kPooled + next++ % kPooled);
  }

  // `seed` draws what the random policy lets run; if lagging, 0 holds default streams back, and 1 all others.
  void set_policy(Policy policy, uint64_t seed) {
    std::lock_guard lock(mutex_);
    policy_ = policy;
    asked_ = false;
    seed_ = seed;
    random_.seed(seed);
    wake();
  }

  // Raises what the device has failed with, as every launch on a device does once a kernel has failed.
  Mark enqueue(Stream* stream, std::function<void()> run, Mark after = {}) {
    std::lock_guard lock(mutex_);
    check(stream->device);
    return push(stream, {std::move(run), after});
  }

  // For what may not raise, such as the end of a tensor: it is left out where the device has failed.
  void enqueue_quietly(Stream* stream, std::function<void()> run) {
    std::lock_guard lock(mutex_);
    if (errors_[stream->device].empty()) push(stream, {std::move(run), {}});
  }

  Mark end_of(Stream* stream) {
    std::lock_guard lock(mutex_);
    return {stream, stream->enqueued, stream->milliseconds};
  }

  bool reached(Mark mark) {
    std::lock_guard lock(mutex_);
    return mark.stream == nullptr || mark.stream->done >= mark.position;
  }

  // Asks on the program's behalf, which counts as demanding, so that who asks again and again comes to an end.
  bool query(Mark mark) {
    std::lock_guard lock(mutex_);
    if (mark.stream == nullptr || mark.stream->done >= mark.position) return true;
    asked_ = true;
    demand(mark);
    wake();
    return false;
  }

  // Blocks the host, which is counted under `why`.
  void wait(Mark mark, const std::string& why) {
    std::unique_lock lock(mutex_);
    blocked_[why]++;
    finish(lock, mark);
    check(mark.stream->device);
  }

  void wait_for_device(int device, const std::string& why) {
    std::unique_lock lock(mutex_);
    blocked_[why]++;
    finish_all(lock, device);
    check(device);
  }

  std::map<std::string, int64_t> blocked() {
    std::lock_guard lock(mutex_);
    return blocked_;
  }

  // Lets everything run, and forgets all errors and counts.
  void restart() {
    std::unique_lock lock(mutex_);
    for (int device = 0; device < kDevices; device++) {
      finish_all(lock, device);
      errors_[device].clear();
    }
    for (Stream* stream : started_) stream->milliseconds = 0;
    blocked_.clear();
  }

  // A forked child has none of the threads, and perhaps a locked mutex.
  bool owned() const { return getpid() == owner_; }

 private:
  void check(int device) const {
    if (errors_[device].empty()) return;
    throw std::runtime_error("device " + std::to_string(device) + " has failed: " + errors_[device]);
  }

  Mark push(Stream* stream, Operation operation) {
    stream->milliseconds = std::max(stream->milliseconds, operation.after.milliseconds) + 1;
    stream->waiting.push_back(std::move(operation));
    stream->enqueued++;
    if (policy_ == Policy::random && random_() % 2) {
      Stream* lucky = started_.empty() ? stream : started_[random_() % started_.size()];
      uint64_t behind = lucky->enqueued - lucky->done;
      lucky->released = lucky->done + (behind ? random_() % (behind + 1) : 0);
    }
    if (!stream->started) {
      stream->started = true;
      started_.push_back(stream);
      std::thread([this, stream] { work(stream); }).detach();
    }
    wake();
    return {stream, stream->enqueued, stream->milliseconds};
  }

  // Has every stream with something to do look whether it may. Idle ones, up to 130 threads, sleep on.
  void wake() {
    for (Stream* stream : started_)
      if (!stream->waiting.empty()) stream->woken.notify_one();
  }

  void demand(Mark mark) {
    if (mark.stream->demanded < mark.position) {
      mark.stream->demanded = mark.position;
      wake();
    }
  }

  void finish(std::unique_lock<std::mutex>& lock, Mark mark) {
    if (mark.stream->done >= mark.position) return;
    waiting_++;
    demand(mark);
    wake();  // also what was demanded before, and held back for the host
    hosts_.wait(lock, [&] { return mark.stream->done >= mark.position; });
    waiting_--;
  }

  void finish_all(std::unique_lock<std::mutex>& lock, int device) {
    for (size_t k = 0; k < started_.size(); k++)  // one that starts meanwhile is waited for, too
      if (started_[k]->device == device) finish(lock, {started_[k], started_[k]->enqueued, 0});
  }

  bool lags(const Stream* stream) const {
    return policy_ == Policy::lagging && (stream->id == 0) == (seed_ == 0);
  }

  bool may_run(const Stream* stream) const {
    bool demanded = stream->demanded > stream->done;
    if (policy_ == Policy::late) return demanded;
    if (policy_ == Policy::random) return demanded || stream->released > stream->done;
    if (!lags(stream)) return true;
    if (!demanded || (waiting_ == 0 && !asked_)) return false;  // the host may still enqueue what goes first
    for (const Stream* other : started_)  // those that do not lag go first, as far as they can
      if (!lags(other) && !other->idle() && !blocked_at(other)) return false;
    return true;
  }

  static bool blocked_at(const Stream* stream) {
    if (stream->waiting.empty()) return false;  // its last operation is running
    const Mark& after = stream->waiting.front().after;
    return after.stream != nullptr && after.stream->done < after.position;
  }

  bool ready(Stream* stream) {
    if (stream->waiting.empty() || !may_run(stream)) return false;
    if (!blocked_at(stream)) return true;
    demand(stream->waiting.front().after);
    return false;
  }

  void work(Stream* stream) {
    prepare_thread();
    std::unique_lock lock(mutex_);
    while (true) {
      stream->woken.wait(lock, [&] { return ready(stream); });
      Operation operation = std::move(stream->waiting.front());
      stream->waiting.pop_front();
      std::string& error = errors_[stream->device];
      if (operation.run && error.empty()) {
        std::string found;
        lock.unlock();
        try {
          operation.run();
        } catch (const std::exception& caught) {
          found = words_of(caught);
        }
        operation.run = nullptr;  // what it holds is let go without the lock
        lock.lock();
        if (error.empty()) error = found;
      }
      stream->done++;
      hosts_.notify_all();
      wake();
    }
  }

  // These two are for whoever has these streams to define.
  static void prepare_thread();
  static std::string words_of(const std::exception& error);

  std::mutex mutex_;
  std::condition_variable hosts_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Stream*> started_;
  std::map<int, int> next_;
  std::map<std::string, int64_t> blocked_;
  std::string errors_[kDevices];
  Policy policy_ = Policy::soon;
  uint64_t seed_ = 0;
  int waiting_ = 0;  // threads of the host that wait for a mark
  bool asked_ = false;  // whether the host has asked for a mark instead, and may do nothing else until it is reached
  std::mt19937_64 random_;
  pid_t owner_ = getpid();
};

Streams& streams();

int current_device();
Stream* current_stream(int device);

}  // namespace rig
