// What the calls of the counterfeit's interface share: devices, orders, copies, fills and events.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <unordered_map>

#include "graphs.h"
#include "locked.h"
#include "memory.h"
#include "streams.h"

namespace fake {

using rig::Locked;
using rig::Stream;

inline thread_local int this_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local std::string last_words;

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
inline thread_local std::vector<Launch> launches;

// Says what should not have happened, in the file that FAKE_CUDART_LOG names.
inline void complain(const std::string& words) {
  const char* path = getenv("FAKE_CUDART_LOG");
  int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0644) : 2;
  std::string line = words + "\n";
  if (write(file, line.data(), line.size()) < 0 || (path && close(file))) abort();
}

// The order in which streams run: soon:0, late:0, random:SEED, or lagging:0 or 1 (tests/rig/streams.h).
struct Order {
  rig::Policy policy;
  uint64_t seed;

  explicit Order(const std::string& text) {
    static const std::map<std::string, rig::Policy> names = {
        {"soon", rig::Policy::soon}, {"late", rig::Policy::late},
        {"random", rig::Policy::random}, {"lagging", rig::Policy::lagging}};
    size_t colon = text.find(':');
    auto found = names.find(text.substr(0, colon));
    if (found == names.end() || colon == text.npos) {
      complain("no order of streams: " + text);
      abort();
    }
    policy = found->second;
    seed = strtoull(text.c_str() + colon + 1, nullptr, 10);
  }
};

// All are made when they are first asked for, since torch's libraries register kernels before anything runs, and are
// never destroyed, since threads may still use them while the process ends.
template <class T>
T& only() {
  static auto* one = new T();
  return *one;
}

// From the environment at first: FAKE_CUDART_ORDER.
inline Order& order() {
  static auto* one = new Order(getenv("FAKE_CUDART_ORDER") ? getenv("FAKE_CUDART_ORDER") : "soon:0");
  return *one;
}
inline Captures& captures() { return only<Captures>(); }
inline Locked& locked() { return only<Locked>(); }
inline std::unordered_map<const void*, std::string_view>& kernels() {
  return only<std::unordered_map<const void*, std::string_view>>();
}

inline Memory& memory(int device) {
  static auto* all = new std::vector<Memory>(rig::kDevices);
  return all->at(device);
}

inline Memory* holder(const void* pointer) {
  for (int device = 0; device < rig::kDevices; device++)
    if (memory(device).holds(pointer)) return &memory(device);
  return nullptr;
}

// The legacy default stream and that of the thread are one, as the streams that torch makes do not wait for either.
inline Stream* stream_of(cudaStream_t stream) {
  uintptr_t handle = reinterpret_cast<uintptr_t>(stream);
  return handle <= 2 ? rig::streams().of(this_device, 0) : reinterpret_cast<Stream*>(stream);
}

inline cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// Runs a call, for which a device that has failed raises what it has failed with.
template <class Call>
cudaError_t attempt(Call call) {
  if (!rig::streams().owned()) return answer(cudaErrorInitializationError);  // a forked child
  try {
    return answer(call());
  } catch (const std::exception& error) {
    last_words = error.what();
    return answer(cudaErrorIllegalAddress);
  }
}

// The same for what may not be called during a capture.
template <class Call>
cudaError_t attempt_unsafe(Call call) {
  return attempt([&] {
    cudaError_t error = captures().check_unsafe();
    return error == cudaSuccess ? call() : error;
  });
}

inline cudaError_t enqueue(Stream* stream, std::function<void()> run) {
  if (auto capture = captures().of(stream)) return captures().add(capture, stream, std::move(run));
  rig::streams().enqueue(stream, std::move(run));
  return cudaSuccess;
}

// Where what runs on a device finds bytes, of which the host's are page-locked or those of a call that waits.
inline char* bytes_at(const void* pointer, size_t nbytes) {
  Memory* found = holder(pointer);
  return found ? found->bytes(pointer, nbytes) : static_cast<char*>(const_cast<void*>(pointer));
}

inline cudaError_t copy(void* target, const void* source, size_t nbytes, Stream* stream) {
  if (nbytes == 0) return cudaSuccess;
  auto move = [=] { memmove(bytes_at(target, nbytes), bytes_at(source, nbytes), nbytes); };
  const void* host = holder(target) ? source : target;
  if (holder(host)) return enqueue(stream, move);
  auto capture = captures().of(stream);
  if (!locked().holds(host, nbytes)) {  // the host waits behind all that is enqueued
    if (capture) return captures().refuse(capture);
    rig::streams().wait(rig::streams().enqueue(stream, move), "a pageable copy");
    return cudaSuccess;
  }
  if (capture) {  // each replay needs memory that is page-locked then
    return enqueue(stream, [=] {
      if (!locked().holds(host, nbytes)) throw std::runtime_error("a graph copies host memory that is not page-locked");
      move();
    });
  }
  return enqueue(stream, [=, held = std::make_shared<Locked::Copy>(locked(), host, nbytes)] {
    held->check();
    move();
  });
}

inline cudaError_t fill(void* target, const std::string& value, size_t count, Stream* stream) {
  return enqueue(stream, [=] {
    char* bytes = bytes_at(target, count * value.size());
    for (size_t k = 0; k < count; k++) memcpy(bytes + k * value.size(), value.data(), value.size());
  });
}

// The bytes of one value that a kernel fills a contiguous tensor with; 0 for any other kernel. torch's fills are
// elementwise kernels of a FillFunctor, whose first arguments are the count, the value, and the address.
inline size_t filled_bytes(std::string_view name) {
  constexpr std::string_view functor = "11FillFunctorI";
  size_t at = name.find(functor);
  bool contiguous = name.find("vectorized_elementwise_kernel") != name.npos ||
                    name.find("unrolled_elementwise_kernel") != name.npos;
  if (!contiguous || at == name.npos) return 0;
  std::string_view type = name.substr(at + functor.size());
  static const std::map<std::string_view, size_t> sizes = {
      {"bEE", 1}, {"aEE", 1}, {"hEE", 1}, {"sEE", 2}, {"iEE", 4}, {"lEE", 8}, {"fEE", 4}, {"dEE", 8},
      {"N3c108BFloat16EEE", 2}, {"N3c104HalfEEE", 2}};
  for (auto& [code, size] : sizes)
    if (type.substr(0, code.size()) == code) return size;
  return 0;
}

inline cudaError_t launch(const void* function, void** arguments, cudaStream_t stream) {
  if (stream_of(stream)->device != this_device) return cudaErrorInvalidResourceHandle;  // copies may be elsewhere
  std::string_view name = kernels()[function];
  size_t size = filled_bytes(name);
  if (size == 0) {
    last_words = "the counterfeit libcudart runs no compute kernels: " + std::string(name);
    return cudaErrorNotSupported;
  }
  std::string value(static_cast<char*>(arguments[1]), size);
  void* target = *static_cast<void**>(arguments[2]);
  return fill(target, value, *static_cast<int*>(arguments[0]), stream_of(stream));
}

inline cudaError_t make_stream(cudaStream_t* stream, unsigned flags, int priority) {
  if (flags != cudaStreamNonBlocking) return cudaErrorNotSupported;  // it would wait for the default stream
  static std::atomic<int> made[rig::kDevices][2];
  if (made[this_device][priority < 0]++ == rig::kPooled) return cudaErrorMemoryAllocation;
  *stream = reinterpret_cast<cudaStream_t>(rig::streams().next_pooled(this_device, priority < 0));
  return cudaSuccess;
}

inline cudaError_t record(cudaEvent_t event, cudaStream_t handle) {
  Stream* stream = stream_of(handle);
  if (stream->device != event->device) return cudaErrorInvalidResourceHandle;
  if (auto capture = captures().of(stream)) {
    captures().record(capture, stream, event);
    return cudaSuccess;
  }
  event->capture = nullptr;
  event->ran_at = std::make_shared<int64_t>();
  event->mark = rig::streams().enqueue(stream, [at = event->ran_at] {
    *at = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  });
  return cudaSuccess;
}

// Host memory that was freed while it was page-locked can be told by its pages being gone.
inline bool mapped(void* start, size_t nbytes) {
  auto first = reinterpret_cast<uintptr_t>(start) / 4096 * 4096;
  size_t pages = (reinterpret_cast<uintptr_t>(start) + nbytes - first + 4095) / 4096;
  std::vector<unsigned char> found(pages);
  return mincore(reinterpret_cast<void*>(first), pages * 4096, found.data()) == 0;
}

}  // namespace fake
