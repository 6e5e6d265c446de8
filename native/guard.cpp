#include "guard.h"

#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "failure.h"

namespace penstock {

namespace {

struct Slot {
    std::atomic<bool> used{false};
    std::atomic<uintptr_t> start{0}, stop{0};
    std::atomic<bool> hit{false};
};

Slot slots[256];
std::mutex installing;
struct sigaction before {};
std::atomic<uintptr_t> passed_on{0};  // where the last fault was that is not ours; 1 if somebody raised the signal
const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));

// Only what may run in the handler of a signal: atomics without locks, and one system call.
bool put_zeros(uintptr_t address) {
    const int kept = errno;
    for (Slot &one : slots) {
        if (address < one.start || address >= one.stop) continue;
        one.hit = true;
        void *place = reinterpret_cast<void *>(address / page * page);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        const bool done = mmap(place, page, PROT_READ, flags, -1, 0) == place;
        errno = kept;
        return done;
    }
    return false;
}

void handle(int signal, siginfo_t *info, void *context) {
    if (info->si_code == BUS_ADRERR && put_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) return;
    const uintptr_t address = info->si_code > 0 ? reinterpret_cast<uintptr_t>(info->si_addr) : 0;
    const uintptr_t last = passed_on.exchange(address ? address : 1);
    // A handler that only says what happened, such as faulthandler's, gives the signal back, and it comes again.
    const bool again = last && (!address || last == address);
    if (!again && (before.sa_flags & SA_SIGINFO)) {
        before.sa_sigaction(signal, info, context);
    } else if (!again && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(signal);
    } else {
        ::signal(signal, SIG_DFL);
        if (!address) raise(signal);  // a read faults again by itself
    }
}

void install() {
    std::lock_guard<std::mutex> guard(installing);
    struct sigaction now {};
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle) return;
    before = now;
    struct sigaction ours {};
    ours.sa_sigaction = handle;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

int32_t guard(const void *memory, int64_t nbytes) {
    for (Slot &one : slots) {
        bool used = false;
        if (!one.used.compare_exchange_strong(used, true)) continue;
        one.hit = false;
        one.start = reinterpret_cast<uintptr_t>(memory);
        one.stop = one.start + static_cast<uintptr_t>(nbytes);
        install();
        return static_cast<int32_t>(&one - slots);
    }
    return -1;
}

void unguard(int32_t number) {
    slots[number].stop = 0;
    slots[number].start = 0;
    slots[number].used = false;
}

bool guard_hit(int32_t number) { return slots[number].hit; }

Guard::Guard(const void *memory, int64_t nbytes) : number_(guard(memory, nbytes)) {
    if (number_ < 0)
        throw Failure(PS_STREAM, "more programs are loaded than can be protected from files that shrink: close some");
}

}  // namespace penstock
