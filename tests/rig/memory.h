// Memory of the rig. A device address is one that the host may not touch; the bytes lie a fixed distance behind it.
//
// Freed blocks are kept for the stream that they were made on, overwritten with 0xFF on that stream, and given out
// again at once: as with CUDA's allocator, what another stream still reads there is lost unless the program has
// ordered it.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <list>
#include <set>

#include <c10/core/CachingDeviceAllocator.h>

#include "locked.h"
#include "streams.h"

namespace rig {

constexpr size_t kSpan = size_t(1) << 34;  // addresses of a device, and of the bytes behind them
constexpr size_t kBlock = 512;             // all blocks are multiples of it, and begin at one

// The memory of one device.
class Memory {
 public:
  explicit Memory(int device) : device_(device) {
    void* base = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(base != MAP_FAILED, "the rig has no addresses for its memory");
    base_ = static_cast<char*>(base);
    TORCH_CHECK(mprotect(base_ + kSpan, kSpan, PROT_READ | PROT_WRITE) == 0, "the rig has no memory");
  }

  bool holds(const void* pointer) const { return pointer >= base_ && pointer < base_ + kSpan; }

  // The address at which a kernel of the device finds the bytes of a device address.
  static char* behind(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)) + kSpan; }

  void* allocate(size_t nbytes) {
    size_t size = (nbytes + kBlock - 1) / kBlock * kBlock;
    Stream* stream = current_stream(device_);
    std::lock_guard lock(mutex_);
    collect();
    char* found = take(free_[{stream, size}]);
    if (found == nullptr) found = map(size);
    if (found == nullptr) {
      empty_locked();
      found = map(size);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, found != nullptr, "rig:", device_, " is out of memory: ", nbytes, " bytes, with ",
        reserved_, " of ", limit_, " reserved");
    blocks_[found] = {size, stream, {}};
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    return found;
  }

  void release(void* pointer) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(pointer));
    Block block = found->second;
    blocks_.erase(found);
    allocated_ -= block.size;
    std::vector<Mark> marks;
    for (Stream* other : block.used_on) marks.push_back(streams().end_of(other));
    used_.push_back({static_cast<char*>(pointer), block, marks});
    collect();
  }

  void use_on(void* pointer, Stream* stream) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(pointer));
    if (found != blocks_.end() && found->second.stream != stream) found->second.used_on.insert(stream);
  }

  void empty_cache() {
    std::lock_guard lock(mutex_);
    empty_locked();
  }

  void set_limit(size_t nbytes) {
    std::lock_guard lock(mutex_);
    limit_ = nbytes;
  }

  size_t limit() const { return limit_; }
  size_t reserved() const { return reserved_; }
  size_t allocated() const { return allocated_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = allocated_; }

 private:
  struct Block {
    size_t size;
    Stream* stream;
    std::set<Stream*> used_on;
  };
  struct Used {
    char* pointer;
    Block block;
    std::vector<Mark> marks;
  };

  static char* take(std::vector<char*>& list) {
    if (list.empty()) return nullptr;
    char* last = list.back();
    list.pop_back();
    return last;
  }

  // Frees what is used on other streams no more. What is not asked about again and again stays, as with CUDA.
  void collect() {
    for (auto it = used_.begin(); it != used_.end();) {
      bool done = true;
      for (Mark& mark : it->marks) done = streams().reached(mark) && done;
      if (done) {
        char* bytes = behind(it->pointer);
        size_t size = it->block.size;
        streams().enqueue_quietly(it->block.stream, [bytes, size] { memset(bytes, 0xFF, size); });
        free_[{it->block.stream, size}].push_back(it->pointer);
        it = used_.erase(it);
      } else {
        ++it;
      }
    }
  }

  char* map(size_t size) {
    if (reserved_ + size > limit_) return nullptr;
    char* found = take(returned_[size]);
    if (found == nullptr) {
      if (mapped_ + size > kSpan) return nullptr;
      found = base_ + mapped_;
      mapped_ += size;
    }
    reserved_ += size;
    memset(behind(found), 0xFF, size);  // nothing has run there since the device was idle
    return found;
  }

  // Gives back to the driver what is free, which waits for the device.
  void empty_locked() {
    collect();
    try {
      streams().wait_for_device(device_, "emptying the cache");
    } catch (const std::exception&) {  // a device that has failed runs nothing any more
    }
    for (auto& [key, list] : free_) {
      for (char* pointer : list) {
        give_back(behind(pointer), key.second);
        returned_[key.second].push_back(pointer);
        reserved_ -= key.second;
      }
      list.clear();
    }
  }

  // The whole pages of a block go back to the system; its neighbours may share the others.
  static void give_back(char* bytes, size_t size) {
    constexpr uintptr_t page = 4096;
    auto start = (reinterpret_cast<uintptr_t>(bytes) + page - 1) / page * page;
    auto stop = (reinterpret_cast<uintptr_t>(bytes) + size) / page * page;
    if (start < stop) madvise(reinterpret_cast<void*>(start), stop - start, MADV_DONTNEED);
  }

  int device_;
  char* base_;
  std::mutex mutex_;
  size_t limit_ = size_t(4) << 30;
  size_t mapped_ = 0, reserved_ = 0, allocated_ = 0, peak_ = 0;
  std::map<char*, Block> blocks_;
  std::list<Used> used_;
  std::map<std::pair<Stream*, size_t>, std::vector<char*>> free_;
  std::map<size_t, std::vector<char*>> returned_;
};

Memory& memory(int device);

void release_anywhere(void* pointer);

// torch's interface to the memory of all devices.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = current_device();
    void* pointer = nbytes ? memory(device).allocate(nbytes) : nullptr;
    return {pointer, pointer, release_anywhere, c10::Device(c10::DeviceType::PrivateUse1, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release_anywhere; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not a copy for the host"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) memory(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    memory(data.device().index()).use_on(data.get(), streams().of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all].current = memory(device).allocated();
    stats.allocated_bytes[all].peak = memory(device).peak();
    stats.reserved_bytes[all].current = memory(device).reserved();
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { memory(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t reserved = memory(device).reserved(), limit = memory(device).limit();
    return {limit - std::min(limit, reserved), limit};
  }
};

// The host memory that torch's pin_memory gets: as with CUDA, rounded up to a power of two.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    size_t size = 4096;
    while (size < nbytes) size *= 2;
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 4096, size) == 0, "no host memory");
    locked().add(pointer, size, true);
    return {pointer, pointer, unlock, c10::Device(c10::DeviceType::CPU)};
  }
  static void unlock(void* pointer) {
    if (streams().owned()) locked().remove(pointer);
  }
  c10::DeleterFnPtr raw_deleter() const override { return unlock; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    memcpy(target, source, nbytes);
  }
};

}  // namespace rig
