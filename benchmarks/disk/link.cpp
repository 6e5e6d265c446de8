// A link of a known rate, for benchmarks/disk/depth.py: reads that bring nothing and take as long as on such a link.
//
// Reads share the rate in the order in which they begin, and each ends when its bytes have flowed and the link has
// answered. The threads that read sleep, as they do while a disk works.
#include <sys/prctl.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace {

std::mutex lock;
double ns_per_byte = 0;
int64_t answer_ns = 0, free_at = 0;

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

}  // namespace

extern "C" void link_set(double bytes_per_s, int64_t answer) {
    const std::lock_guard<std::mutex> held(lock);
    ns_per_byte = 1e9 / bytes_per_s;
    answer_ns = answer;
}

// A ps_read of native/penstock.h.
extern "C" int link_read(void *, int32_t, int64_t, void *, int64_t nbytes) {
    static thread_local const int precise = prctl(PR_SET_TIMERSLACK, 1000);
    (void)precise;
    int64_t end;
    {
        const std::lock_guard<std::mutex> held(lock);
        free_at = std::max(free_at, now()) + static_cast<int64_t>(static_cast<double>(nbytes) * ns_per_byte);
        end = free_at + answer_ns;
    }
    const timespec until = {end / 1000000000, end % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr)) {
    }
    return 0;
}
