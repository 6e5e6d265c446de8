// Memory of the counterfeit's devices: addresses that the host may not touch, and the bytes a fixed distance behind.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace fake {

constexpr size_t kSpan = size_t(1) << 32;  // addresses of a device, and of the bytes behind them
constexpr size_t kPage = 2 << 20;          // blocks begin at multiples of it, as the driver's do
constexpr size_t kMemory = 1 << 30;        // bytes that a device says it has

class Memory {
 public:
  Memory() {
    void* base = mmap(nullptr, 2 * kSpan + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::runtime_error("no addresses for the memory of a device");
    base_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + kPage - 1) / kPage * kPage);
    if (mprotect(base_ + kSpan, kSpan, PROT_READ | PROT_WRITE)) throw std::runtime_error("no memory for a device");
  }

  bool holds(const void* pointer) const { return pointer >= base_ && pointer < base_ + kSpan; }

  // Returns nullptr where the device has no room. Fresh memory is all 0xFF, so that nobody takes it for zeros.
  void* allocate(size_t nbytes) {
    std::lock_guard lock(mutex_);
    size_t size = (nbytes + kPage - 1) / kPage * kPage;
    if (taken_ + size > kMemory) return nullptr;
    char* found = base_;
    for (auto& [start, block] : blocks_) {  // the first gap that is large enough
      if (start >= found + size) break;
      found = start + block;
    }
    if (found + size > base_ + kSpan) return nullptr;
    blocks_[found] = size;
    taken_ += size;
    memset(found + kSpan, 0xFF, size);
    return found;
  }

  bool release(void* pointer) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.find(static_cast<char*>(pointer));
    if (found == blocks_.end()) return false;
    madvise(found->first + kSpan, found->second, MADV_DONTNEED);
    taken_ -= found->second;
    blocks_.erase(found);
    return true;
  }

  size_t free_bytes() {
    std::lock_guard lock(mutex_);
    return kMemory - taken_;
  }

  // Where what runs on the device finds a range of its memory, which has to be allocated when it runs.
  char* bytes(const void* pointer, size_t nbytes) {
    std::lock_guard lock(mutex_);
    char* start = static_cast<char*>(const_cast<void*>(pointer));
    auto next = blocks_.upper_bound(start);
    if (next == blocks_.begin() || start + nbytes > std::prev(next)->first + std::prev(next)->second)
      throw std::runtime_error("an illegal address: " + std::to_string(nbytes) + " bytes that are not allocated");
    return start + kSpan;
  }

 private:
  char* base_;
  std::mutex mutex_;
  std::map<char*, size_t> blocks_;
  size_t taken_ = 0;
};

}  // namespace fake
