// Reads a file past the page cache with threads and with io_uring, alone or beside two threads that compute.
//
//   g++ -O2 -std=c++17 benchmarks/disk/uring.cpp -o uring -luring -pthread        (Debian: liburing-dev)
//   ./uring FILE MIB ROUNDS [beside]
//
// Every way reads the same bytes into the same 64 MiB, in an order that rotates from round to round. Medians are printed:
// seconds, GB/s, seconds of the processor that reading took and, beside computing, the MiB that were summed in a second.
#include <fcntl.h>
#include <liburing.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t MIB = 1 << 20, ROOM = 64 * MIB, WORK = 256 * MIB;

int file;
int64_t total;
char *room;

struct Way {
    std::string name;
    std::function<void()> read;
    std::vector<double> seconds, processor, work;
};

void require(bool fine, const char *what) {
    if (fine) return;
    std::perror(what);
    std::exit(1);
}

double since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

double seconds_of(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void read_by_threads(int count, int64_t block) {
    std::atomic<int64_t> next{0};
    std::vector<std::thread> readers;
    for (int k = 0; k < count; ++k)
        readers.emplace_back([&] {
            for (int64_t at; (at = next.fetch_add(block)) < total;)
                require(pread(file, room + at % ROOM, block, at) == block, "pread");
        });
    for (std::thread &one : readers) one.join();
}

void read_by_uring(int depth, int64_t block, bool registered) {
    io_uring ring;
    require(io_uring_queue_init(depth, &ring, 0) == 0, "io_uring_queue_init");
    const iovec whole{room, ROOM};
    if (registered) require(io_uring_register_buffers(&ring, &whole, 1) == 0, "io_uring_register_buffers");
    int64_t at = 0;
    for (int under_way = 0; at < total || under_way;) {
        for (; at < total && under_way < depth; at += block, ++under_way) {
            io_uring_sqe *const entry = io_uring_get_sqe(&ring);
            if (registered)
                io_uring_prep_read_fixed(entry, file, room + at % ROOM, block, at, 0);
            else
                io_uring_prep_read(entry, file, room + at % ROOM, block, at);
        }
        require(io_uring_submit_and_wait(&ring, 1) >= 0, "io_uring_submit_and_wait");
        for (io_uring_cqe *done; under_way && io_uring_peek_cqe(&ring, &done) == 0; --under_way) {
            require(done->res == block, "a read by io_uring");
            io_uring_cqe_seen(&ring, done);
        }
    }
    io_uring_queue_exit(&ring);
}

// Runs a way once; `beside`, two threads sum memory meanwhile.
void measure(Way &way, bool beside, const std::vector<uint64_t> &memory) {
    std::atomic<bool> stop{false};
    std::atomic<int64_t> summed{0}, sum{0};
    std::atomic<double> computing{0};
    std::vector<std::thread> busy;
    for (int k = 0; beside && k < 2; ++k)
        busy.emplace_back([&] {
            const auto step = static_cast<std::ptrdiff_t>(MIB / 8);
            for (auto place = memory.begin(); !stop; ++summed) {
                if (memory.end() - place < step) place = memory.begin();
                sum += static_cast<int64_t>(std::accumulate(place, place + step, uint64_t{0}));
                place += step;
            }
            double before = computing, mine = seconds_of(CLOCK_THREAD_CPUTIME_ID);
            while (!computing.compare_exchange_weak(before, before + mine)) {
            }
        });
    const double processor = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const auto began = std::chrono::steady_clock::now();
    way.read();
    const double seconds = since(began);
    stop = true;
    for (std::thread &one : busy) one.join();
    way.seconds.push_back(seconds);
    way.processor.push_back(seconds_of(CLOCK_PROCESS_CPUTIME_ID) - processor - computing);
    way.work.push_back(static_cast<double>(summed) / seconds);
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int count, char **given) {
    if (count < 4) return std::fprintf(stderr, "usage: uring FILE MIB ROUNDS [beside]\n"), 2;
    file = open(given[1], O_RDONLY | O_DIRECT);
    require(file >= 0, given[1]);
    struct stat status;
    require(fstat(file, &status) == 0, given[1]);
    total = std::min<int64_t>(status.st_size, std::atoll(given[2]) * MIB) / (16 * MIB) * (16 * MIB);
    room = static_cast<char *>(std::aligned_alloc(2 * MIB, ROOM));
    madvise(room, ROOM, MADV_HUGEPAGE);
    std::fill(room, room + ROOM, 1);
    const std::vector<uint64_t> memory(WORK / 8, 1);

    std::vector<Way> ways;
    for (const auto &[threads, mib] : {std::pair{2, 2}, {3, 2}, {4, 2}, {2, 4}, {4, 4}, {2, 8}})
        ways.push_back({std::to_string(threads) + " threads, blocks of " + std::to_string(mib) + " MiB",
                        [threads = threads, mib = mib] { read_by_threads(threads, mib * MIB); }});
    for (const auto &[depth, mib] : {std::pair{2, 2}, {4, 2}, {8, 2}, {4, 4}, {16, 1}})
        for (const bool registered : {false, true})
            ways.push_back({"io_uring, " + std::to_string(depth) + " blocks of " + std::to_string(mib) + " MiB" +
                                (registered ? ", registered" : ""),
                            [=, depth = depth, mib = mib] { read_by_uring(depth, mib * MIB, registered); }});
    for (int round = 0; round < std::atoi(given[3]); ++round)
        for (size_t k = 0; k < ways.size(); ++k) measure(ways[(k + round) % ways.size()], count > 4, memory);
    for (const Way &way : ways)
        std::printf("%-38s %.3f s %.2f GB/s, processor %.3f s, %.0f MiB/s summed\n", way.name.c_str(), median(way.seconds),
                    static_cast<double>(total) / median(way.seconds) / 1e9, median(way.processor), median(way.work));
}
