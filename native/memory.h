// Virtual memory of this process: reserved, mapped, advised about, and moved.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

inline const int64_t PAGE = sysconf(_SC_PAGESIZE);
constexpr int64_t HUGE_PAGE = 2 << 20;

inline int64_t round_down(int64_t value, int64_t unit) { return value - value % unit; }
inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Address space that begins at a multiple of 2 MiB, with an inaccessible page on either side, which stops overruns.
class Reservation {
  public:
    explicit Reservation(int64_t nbytes);
    ~Reservation();
    Reservation(const Reservation &) = delete;

    char *at(int64_t offset) const { return memory_ + offset; }
    int64_t nbytes() const { return nbytes_; }

    // Maps private, writable pages of zeros. Raises PS_STREAM.
    void map_anonymous(int64_t start, int64_t nbytes);

    // Maps whole pages of a file, read-only. Returns 0, or the errno of what the system refuses.
    int map_file(int64_t start, int64_t nbytes, int fd, int64_t offset);

  private:
    int64_t nbytes_;
    void *reserved_;
    size_t reserved_nbytes_;
    char *memory_;
};

// madvise(2), again after an interruption; returns 0 or the error number. `hint` ignores what a kernel does not know.
int advise(char *address, int64_t nbytes, int advice);
void hint(char *address, int64_t nbytes, int advice);

// Gives pages back. Raises PS_STREAM.
void drop_pages(char *address, int64_t nbytes);

// Fills the page tables of a file's mapping; returns 0 or the error number.
int populate(char *address, int64_t nbytes);

// Tells whether the page cache holds pages of a file's mapping, the first one alone or all; false where nobody tells.
bool is_cached(char *address, int64_t nbytes = PAGE);

// Tells whether file mappings can be populated (Linux 5.14), and private pages moved while their place stays (5.7).
bool supports_populate();
bool supports_move();

// Moves private pages, while their place stays and is empty; false where the system refuses (errno says why).
bool move_pages(char *from, char *to, int64_t nbytes);

// Of the processor, that this thread has taken.
double thread_seconds();

[[noreturn]] void refused(int64_t nbytes, const char *what);

// Takes memory that has never been touched, piece by piece, from any thread. Huge pages mostly come faster than small
// ones. But what a virtual machine has free in whole huge pages its host may have taken back: after some pieces that
// came slowly, small ones are asked for.
class FreshMemory {
  public:
    void take(char *address, int64_t nbytes);

  private:
    static constexpr int PATIENCE = 4;
    static constexpr double SLOW = 1e9;  // bytes a second
    std::atomic<int> slow_{0};
};

// Granules of private memory that are not in use, by their present addresses, in the order they came.
class FreeGranules {
  public:
    FreeGranules(int64_t granule, int64_t most) : granule_(granule) { free_.reserve(most); }

    // Has a free granule at `address`: the one that lies there or, if there is none, the one given last, which moves.
    // Returns where it was, or null where none is free. Raises PS_STREAM where the system refuses; it is free then.
    char *take(char *address);

    void give(char *address) { free_.push_back(address); }

  protected:
    void move(char *from, char *to) const;

    const int64_t granule_;
    std::vector<char *> free_;
};

}  // namespace penstock
