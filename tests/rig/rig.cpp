// The rig: a device of torch's out-of-tree interface (PrivateUse1) on which late kernels, real streams and memory
// that the host cannot touch show what a program has not ordered. See docs/devices.md.
#include <dlfcn.h>

#include <ATen/Parallel.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "kernels.h"
#include "memory.h"
#include "streams.h"

namespace rig {

namespace {

thread_local int this_device = 0;
thread_local int64_t this_stream[kDevices] = {};

c10::Stream as_torch(const Stream* stream) {
  c10::Device device(kRig, static_cast<c10::DeviceIndex>(stream->device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream->id);
}

Stream* as_ours(const c10::Stream& stream) { return streams().of(stream.device_index(), stream.id()); }

std::mutex random_mutex;
int64_t seed = 0, drawn = 0;

struct Event {
  Mark mark;
};

}  // namespace

// They are never destroyed: threads may still use them while the process ends.
Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

Locked& locked() {
  static auto* all = new Locked();
  return *all;
}

Memory& memory(int device) {
  static auto* all = new std::vector<Memory*>();
  static std::once_flag once;
  std::call_once(once, [] {
    for (int k = 0; k < kDevices; k++) all->push_back(new Memory(k));
  });
  return *all->at(device);
}

int current_device() { return this_device; }

Stream* current_stream(int device) { return streams().of(device, this_stream[device]); }

void release_anywhere(void* pointer) {
  if (pointer == nullptr || !streams().owned()) return;
  for (int device = 0; device < kDevices; device++)
    if (memory(device).holds(pointer)) memory(device).release(pointer);
}

uint64_t draw_seed() {
  std::lock_guard lock(random_mutex);
  return std::mt19937_64(static_cast<uint64_t>(seed) * 1'000'003 + static_cast<uint64_t>(drawn++))();
}

// Kernels run on one core each, and record nothing for autograd. OpenMP is asked for by name, since torch brings its
// own; torch asks it for all cores when it is first asked itself.
void Streams::prepare_thread() {
  at::get_num_threads();
  using SetThreads = void (*)(int);
  if (auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
  static thread_local c10::InferenceMode inference(true);
}

std::string Streams::words_of(const std::exception& error) {
  auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kRig; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kRig, static_cast<c10::DeviceIndex>(this_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "the rig has ", kDevices, " devices, and no ", device);
    if (device.has_index()) this_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) this_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return as_torch(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(streams().of(index(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return as_torch(streams().next_pooled(index(device), high));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_torch(streams().next_pooled(index(device), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = as_torch(current_stream(stream.device_index()));
    this_stream[stream.device_index()] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    return streams().query(streams().end_of(as_ours(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    streams().wait(streams().end_of(as_ours(stream)), "a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { streams().wait_for_device(device, "a device"); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {streams().enqueue(as_ours(stream), {})};
  }
  void block(void* event, const c10::Stream& stream) const override {  // never recorded: nothing to wait for
    if (event != nullptr) streams().enqueue(as_ours(stream), {}, static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || streams().query(static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) streams().wait(static_cast<Event*>(event)->mark, "an event");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const Mark &start = static_cast<Event*>(first)->mark, &stop = static_cast<Event*>(second)->mark;
    return static_cast<double>(stop.milliseconds) - static_cast<double>(start.milliseconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory(data.device().index()).use_on(data.get(), as_ours(stream));
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : this_device; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kRig, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(this_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kRig, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return locked().holds(data, 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedAllocator();
    return pinned;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (int device = 0; device < kDevices; device++)
      if (memory(device).holds(data)) return {kRig, static_cast<c10::DeviceIndex>(device)};
    TORCH_CHECK(false, "no memory of the rig");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

Allocator allocator;

const bool registered = [] {
  c10::SetAllocator(kRig, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided_on);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_copy_from", copy);
  library.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    memory(self.device().index()).use_on(self.storage().mutable_data(), as_ours(stream));
  });
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
}

// What tests ask of the rig.
TORCH_LIBRARY(rig, library) {
  library.def("set_policy(str name, int seed) -> ()", [](const std::string& name, int64_t seed) {
    static const std::map<std::string, Policy> policies = {
        {"soon", Policy::soon}, {"late", Policy::late}, {"random", Policy::random}, {"lagging", Policy::lagging}};
    streams().set_policy(policies.at(name), seed);
  });
  library.def("blocked() -> Dict(str, int)", [] {
    c10::Dict<std::string, int64_t> found;
    for (auto& [why, count] : streams().blocked()) found.insert(why, count);
    return found;
  });
  library.def("restart() -> ()", [] { streams().restart(); });
  library.def("set_memory(int nbytes) -> ()", [](int64_t nbytes) {
    for (int device = 0; device < kDevices; device++) memory(device).set_limit(nbytes);
  });
  library.def("random_state() -> (int, int)", [] {
    std::lock_guard lock(random_mutex);
    return std::tuple(seed, drawn);
  });
  library.def("set_random_state(int new_seed, int new_drawn) -> ()", [](int64_t new_seed, int64_t new_drawn) {
    std::lock_guard lock(random_mutex);
    seed = new_seed;
    drawn = new_drawn;
  });
  library.def("lock(int address, int nbytes) -> bool", [](int64_t address, int64_t nbytes) {
    return locked().add(reinterpret_cast<void*>(address), nbytes, false);
  });
  library.def("unlock(int address) -> bool", [](int64_t address) {
    return locked().remove(reinterpret_cast<void*>(address));
  });
  library.def("locked_bytes() -> int", [] { return static_cast<int64_t>(locked().bytes()); });
}

}  // namespace rig
