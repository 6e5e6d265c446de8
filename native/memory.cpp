#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "failure.h"

namespace penstock {

namespace {

// Numbers that older headers lack; they are Linux's on every architecture.
constexpr int POPULATE_READ = 22, POPULATE_WRITE = 23;
constexpr int MOVE = 1 | 2 | 4;  // MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
constexpr int ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

double thread_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void refused(int64_t nbytes, const char *what) {
    throw Failure(PS_STREAM, "the system refused " + std::to_string(nbytes) + " bytes of " + what + " for weights (" +
                                 std::strerror(errno) + "): lower the budget, free memory or raise the process's "
                                 "limits (ulimit -v, vm.max_map_count, vm.overcommit_memory)");
}

Reservation::Reservation(int64_t nbytes) : nbytes_(round_up(std::max<int64_t>(nbytes, 1), PAGE)) {
    reserved_nbytes_ = nbytes_ + 2 * PAGE + HUGE_PAGE;
    reserved_ = mmap(nullptr, reserved_nbytes_, PROT_NONE, ANONYMOUS, -1, 0);
    if (reserved_ == MAP_FAILED) refused(static_cast<int64_t>(reserved_nbytes_), "address space");
    memory_ = reinterpret_cast<char *>(round_up(reinterpret_cast<intptr_t>(reserved_) + PAGE, HUGE_PAGE));
}

Reservation::~Reservation() { munmap(reserved_, reserved_nbytes_); }

void Reservation::map_anonymous(int64_t start, int64_t nbytes) {
    const int protection = PROT_READ | PROT_WRITE;
    if (nbytes && mmap(at(start), nbytes, protection, ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        refused(nbytes, "address space");
}

int Reservation::map_file(int64_t start, int64_t nbytes, int fd, int64_t offset) {
    const bool failed = nbytes && mmap(at(start), nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, offset) == MAP_FAILED;
    return failed ? errno : 0;
}

int advise(char *address, int64_t nbytes, int advice) {
    while (madvise(address, nbytes, advice) != 0)
        if (errno != EAGAIN && errno != EINTR) return errno;
    return 0;
}

void hint(char *address, int64_t nbytes, int advice) { advise(address, nbytes, advice); }

void drop_pages(char *address, int64_t nbytes) {
    if (const int error = advise(address, nbytes, MADV_DONTNEED))
        throw Failure(PS_STREAM,
                      std::string("the system did not take pages of weights back (") + std::strerror(error) + ")");
}

int populate(char *address, int64_t nbytes) { return advise(address, nbytes, POPULATE_READ); }

bool is_cached(char *address, int64_t nbytes) {
    unsigned char pages[HUGE_PAGE / 4096];
    for (int64_t at = 0; at < nbytes; at += HUGE_PAGE) {
        const int64_t some = std::min(HUGE_PAGE, nbytes - at), count = round_up(some, PAGE) / PAGE;
        if (mincore(address + at, some, pages) != 0) return false;
        if (!std::all_of(pages, pages + count, [](unsigned char one) { return one & 1; })) return false;
    }
    return true;
}

bool supports_populate() {
    Reservation pages(PAGE);
    pages.map_anonymous(0, PAGE);
    return populate(pages.at(0), PAGE) == 0;
}

bool supports_move() {
    Reservation pages(2 * PAGE);
    pages.map_anonymous(0, 2 * PAGE);
    return move_pages(pages.at(0), pages.at(PAGE), PAGE);
}

bool move_pages(char *from, char *to, int64_t nbytes) { return mremap(from, nbytes, nbytes, MOVE, to) == to; }

void FreshMemory::take(char *address, int64_t nbytes) {
    const bool huge = slow_ < PATIENCE;
    hint(address, nbytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    const double began = thread_seconds();  // not what other threads had meanwhile
    if (const int error = advise(address, nbytes, POPULATE_WRITE)) {
        errno = error;
        if (error != EINVAL) refused(nbytes, "memory");
        std::memset(address, 0, nbytes);
    }
    if (huge) slow_ = static_cast<double>(nbytes) < SLOW * (thread_seconds() - began) ? slow_ + 1 : 0;
}

char *FreeGranules::take(char *address) {
    if (free_.empty()) return nullptr;
    const auto here = std::find(free_.rbegin(), free_.rend(), address);
    const auto chosen = here == free_.rend() ? free_.rbegin() : here;
    char *const found = *chosen;
    if (found != address) move(found, address);
    free_.erase(std::next(chosen).base());
    return found;
}

void FreeGranules::move(char *from, char *to) const {
    if (!move_pages(from, to, granule_))
        throw Failure(PS_STREAM, "the system did not move " + std::to_string(granule_) +
                                     " bytes of memory for weights (" + std::strerror(errno) +
                                     "): raise its limit on mappings (vm.max_map_count) or lower the budget");
}

}  // namespace penstock
