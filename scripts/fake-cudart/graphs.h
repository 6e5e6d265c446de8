// CUDA graphs by their rules: what a capture may wait for, what may not be called meanwhile, and how it has to end.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "streams.h"

namespace fake {

using Nodes = std::set<size_t>;

struct Node {
  std::function<void()> run;
  Nodes after;  // of the same graph, all of them earlier
};

}  // namespace fake

struct CUgraph_st {
  std::vector<fake::Node> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<fake::Node>> nodes;
};
namespace fake {

struct Capture {
  unsigned long long id;
  rig::Stream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::unique_ptr<CUgraph_st> graph = std::make_unique<CUgraph_st>();
  bool broken = false;
  std::map<rig::Stream*, Nodes> last = {};  // of each stream that takes part: what its next node has to wait for
};

}  // namespace fake

struct CUevent_st {
  int device;
  rig::Mark mark = {};  // of no stream before the event is recorded
  std::shared_ptr<int64_t> ran_at = std::make_shared<int64_t>();  // in nanoseconds
  std::shared_ptr<fake::Capture> capture = nullptr;  // in which it was recorded last, if it was
  fake::Nodes nodes = {};
};

namespace fake {

inline thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

class Captures {
 public:
  std::shared_ptr<Capture> of(rig::Stream* stream) {
    std::lock_guard lock(mutex_);
    auto found = by_stream_.find(stream);
    return found == by_stream_.end() ? nullptr : found->second;
  }

  cudaError_t begin(rig::Stream* stream, cudaStreamCaptureMode mode) {
    std::lock_guard lock(mutex_);
    if (stream->id == 0) return cudaErrorStreamCaptureUnsupported;  // the default stream
    if (by_stream_.count(stream)) return cudaErrorIllegalState;
    auto capture = std::make_shared<Capture>(++count_, stream, mode, std::this_thread::get_id());
    capture->last[stream] = {};
    by_stream_[stream] = capture;
    return cudaSuccess;
  }

  // Every stream that took part has to have been joined by the stream that began.
  cudaError_t end(rig::Stream* stream, cudaGraph_t* graph) {
    std::lock_guard lock(mutex_);
    *graph = nullptr;
    auto found = by_stream_.find(stream);
    if (found == by_stream_.end()) return cudaErrorIllegalState;
    auto capture = found->second;
    if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
      return cudaErrorStreamCaptureWrongThread;
    std::erase_if(by_stream_, [&](auto& one) { return one.second == capture; });
    if (capture->broken) return cudaErrorStreamCaptureInvalidated;
    Nodes joined = capture->last[stream];
    auto& nodes = capture->graph->nodes;
    for (size_t k = nodes.size(); k-- > 0;)
      if (joined.count(k)) joined.insert(nodes[k].after.begin(), nodes[k].after.end());
    if (joined.size() < nodes.size()) return cudaErrorStreamCaptureUnjoined;
    *graph = capture->graph.release();
    return cudaSuccess;
  }

  cudaError_t add(const std::shared_ptr<Capture>& capture, rig::Stream* stream, std::function<void()> run) {
    std::lock_guard lock(mutex_);
    if (capture->broken) return cudaErrorStreamCaptureInvalidated;
    Nodes& last = capture->last[stream];
    capture->graph->nodes.push_back({std::move(run), last});
    last = {capture->graph->nodes.size() - 1};
    return cudaSuccess;
  }

  // What the next node of a stream has to wait for, in numbers that nobody but this looks into.
  std::vector<cudaGraphNode_t> handles(const std::shared_ptr<Capture>& capture, rig::Stream* stream) {
    std::lock_guard lock(mutex_);
    std::vector<cudaGraphNode_t> found;
    for (size_t node : capture->last[stream]) found.push_back(reinterpret_cast<cudaGraphNode_t>(node + 1));
    return found;
  }

  void record(const std::shared_ptr<Capture>& capture, rig::Stream* stream, cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    event->capture = capture;
    event->nodes = capture->last[stream];
  }

  // Has a stream wait for an event where one of them takes part in a capture.
  cudaError_t wait(rig::Stream* stream, cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    auto found = by_stream_.find(stream);
    auto capture = found == by_stream_.end() ? nullptr : found->second;
    if (capture && event->capture == nullptr) return broken(*capture, cudaErrorStreamCaptureIsolation);
    bool goes_on = by_stream_.count(event->capture->origin) && by_stream_[event->capture->origin] == event->capture;
    if (!goes_on) return capture ? broken(*capture, cudaErrorStreamCaptureIsolation) : cudaErrorCapturedEvent;
    if (capture && capture != event->capture) return broken(*capture, cudaErrorStreamCaptureMerge);
    by_stream_[stream] = event->capture;
    event->capture->last[stream].insert(event->nodes.begin(), event->nodes.end());
    return cudaSuccess;
  }

  // Ends what a call makes impossible: one that waits for a stream which takes part in a capture.
  cudaError_t refuse(const std::shared_ptr<Capture>& capture) {
    std::lock_guard lock(mutex_);
    return broken(*capture, cudaErrorStreamCaptureUnsupported);
  }

  // Tells whether this thread may now call what CUDA calls potentially unsafe: what waits, asks, or allocates.
  cudaError_t check_unsafe() {
    std::lock_guard lock(mutex_);
    cudaError_t found = cudaSuccess;
    for (auto& [stream, capture] : by_stream_) {
      bool own = capture->thread == std::this_thread::get_id();
      bool concerned = own ? capture->mode != cudaStreamCaptureModeRelaxed
                           : capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
      if (concerned && thread_mode != cudaStreamCaptureModeRelaxed)
        found = broken(*capture, cudaErrorStreamCaptureUnsupported);
    }
    return found;
  }

 private:
  static cudaError_t broken(Capture& capture, cudaError_t error) {
    capture.broken = true;
    return error;
  }

  std::mutex mutex_;
  unsigned long long count_ = 0;
  std::map<rig::Stream*, std::shared_ptr<Capture>> by_stream_;
};

// Runs all nodes, one after another, in an order that the graph allows: as captured, as differently as can be, or
// as drawn.
inline void run_nodes(const std::vector<Node>& nodes, rig::Policy policy, uint64_t draw) {
  std::mt19937_64 random(draw);
  std::vector<size_t> ready;
  std::vector<size_t> missing(nodes.size());
  for (size_t k = 0; k < nodes.size(); k++)
    if ((missing[k] = nodes[k].after.size()) == 0) ready.push_back(k);
  while (!ready.empty()) {
    auto next = policy == rig::Policy::soon     ? std::min_element(ready.begin(), ready.end())
                : policy == rig::Policy::random ? ready.begin() + random() % ready.size()
                                                : std::max_element(ready.begin(), ready.end());
    size_t chosen = *next;
    ready.erase(next);
    if (nodes[chosen].run) nodes[chosen].run();
    for (size_t k = chosen + 1; k < nodes.size(); k++)
      if (nodes[k].after.count(chosen) && --missing[k] == 0) ready.push_back(k);
  }
}

}  // namespace fake
