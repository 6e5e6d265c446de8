// Page-locked memory of the host: what has been registered, or what an allocator of page-locked memory gave.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

namespace rig {

// The page-locked ranges of the host.
class Locked {
  struct Range {
    uintptr_t stop = 0;
    bool owned = false, removed = false;
    int copies = 0;
  };
  using Ranges = std::map<uintptr_t, Range>;

 public:
  // Returns false where the range touches one that is registered.
  bool add(void* start, size_t nbytes, bool owned) {
    std::lock_guard lock(mutex_);
    auto next = ranges_.upper_bound(address(start));
    if (next != ranges_.end() && next->first < address(start) + nbytes) return false;
    if (next != ranges_.begin() && std::prev(next)->second.stop > address(start)) return false;
    ranges_[address(start)] = {address(start) + nbytes, owned, false, 0};
    return true;
  }

  bool remove(void* start) {
    std::lock_guard lock(mutex_);
    auto found = ranges_.find(address(start));
    if (found == ranges_.end()) return false;
    if (found->second.copies == 0) {
      erase(found);
    } else {
      found->second.removed = true;
    }
    return true;
  }

  bool holds(const void* start, size_t nbytes) {
    std::lock_guard lock(mutex_);
    return find(start, nbytes) != ranges_.end();
  }

  // The size of the range that begins there; 0 where none does.
  size_t bytes_of(const void* start) {
    std::lock_guard lock(mutex_);
    auto found = ranges_.find(address(start));
    return found == ranges_.end() ? 0 : found->second.stop - found->first;
  }

  // A copy on its way: pin_memory's memory outlives it; what was registered has to stay so until it has run.
  class Copy {
   public:
    Copy(Locked& all, const void* start, size_t nbytes) : all_(all) {
      std::lock_guard lock(all_.mutex_);
      range_ = all_.find(start, nbytes);
      range_->second.copies++;
    }
    ~Copy() {
      std::lock_guard lock(all_.mutex_);
      if (--range_->second.copies == 0 && range_->second.removed) all_.erase(range_);
    }
    Copy(const Copy&) = delete;

    void check() {
      std::lock_guard lock(all_.mutex_);
      bool gone = range_->second.removed && !range_->second.owned;
      if (gone) throw std::runtime_error("a copy runs after its host memory was unregistered");
    }

   private:
    Locked& all_;
    Ranges::iterator range_;
  };

  size_t bytes() {
    std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (auto& [start, range] : ranges_) sum += range.removed ? 0 : range.stop - start;
    return sum;
  }

 private:
  static uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

  Ranges::iterator find(const void* start, size_t nbytes) {
    auto next = ranges_.upper_bound(address(start));
    if (next == ranges_.begin()) return ranges_.end();
    auto found = std::prev(next);
    return found->second.stop >= address(start) + nbytes ? found : ranges_.end();
  }

  void erase(Ranges::iterator found) {
    if (found->second.owned) free(reinterpret_cast<void*>(found->first));
    ranges_.erase(found);
  }

  std::mutex mutex_;
  Ranges ranges_;
};

Locked& locked();

}  // namespace rig
