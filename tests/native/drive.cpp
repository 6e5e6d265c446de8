// Drives an engine through passes for the sanitizers: random methods and orders, late reads, failures, aborts.
//
//     drive PAYLOAD PLAN STEPS SEED [FOLDER]
//
// With a FOLDER the engine reads and maps the files there, which leave the page cache now and then; without one it
// reads through a function that is late and fails.
//
// PAYLOAD and PLAN are files of JSON. STEPS has a line "graph step storage offset..." for every read of a step, as
// storage number, its size, and the number of the file and the offset at which its bytes begin. Byte k of file f has
// the value (31 f + 7 k + k / 251) mod 256. Exit status 1 and a line on stderr where a read finds other bytes.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../native/penstock.h"
#include "drive_units.h"

namespace {

std::atomic<bool> failing{false};
std::atomic<unsigned> reads{0};

std::map<int, std::vector<unsigned char>> content;  // of the files

void fill_content(int file, int64_t nbytes) {
    std::vector<unsigned char> &bytes = content[file];
    for (auto k = static_cast<int64_t>(bytes.size()); k < nbytes; ++k)
        bytes.push_back(static_cast<unsigned char>(31 * file + 7 * k + k / 251));
}

int read_late(void *, int32_t file, int64_t offset, void *address, int64_t nbytes) {
    const unsigned number = reads.fetch_add(1) * 2654435761u;
    if (number % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(number % 700));
    if (failing && number % 7 == 0) return 5;
    std::memcpy(address, content[file].data() + offset, nbytes);
    return 0;
}

struct Read {
    int storage, file;
    int64_t nbytes, offset;
};

std::string text_of(const char *path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

void expect(bool right, const std::string &what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

// Takes the files of a folder out of the page cache, as far as they are not mapped.
void cool(const char *folder) {
    for (const auto &one : std::filesystem::directory_iterator(folder)) {
        const int fd = open(one.path().c_str(), O_RDONLY);
        fsync(fd);
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
}

}  // namespace

int main(int count_of_arguments, char **arguments) {
    if (arguments[1] == std::string("units")) return drive_units(arguments + 2);
    const char *const folder = count_of_arguments > 5 ? arguments[5] : nullptr;
    const std::string payload = text_of(arguments[1]), plan = text_of(arguments[2]);
    std::map<int, std::map<int, std::vector<Read>>> methods;
    std::ifstream lines(arguments[3]);
    for (int graph, step; lines >> graph >> step;) {
        Read one;
        lines >> one.storage >> one.nbytes >> one.file >> one.offset;
        methods[graph][step].push_back(one);
        fill_content(one.file, one.offset + one.nbytes);
    }
    std::mt19937 dice(static_cast<unsigned>(std::atoi(arguments[4])));
    ps_options options{};
    options.readers = 3, options.poison = 1, options.drop_early = static_cast<int32_t>(dice() % 2);
    options.patience_ms = static_cast<int32_t>(dice() % 2), options.read = folder ? nullptr : read_late;
    options.available = folder && dice() % 2 ? 1 : 0;  // no room for the files in the page cache
    std::vector<ps_file> files;
    for (const auto &[file, bytes] : content) {
        const std::string path = std::string(folder ? folder : "") + "/weights-" + std::to_string(file);
        struct stat status {};
        files.push_back({folder ? open(path.c_str(), O_RDONLY) : -1, 0, 0});
        if (folder) fstat(files.back().fd, &status);
        files.back().mtime_ns = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
        files.back().ctime_ns = status.st_ctim.tv_sec * 1000000000LL + status.st_ctim.tv_nsec;
    }
    options.opened = files.data();
    ps_engine *engine;
    char error[1000];
    expect(ps_open(payload.c_str(), plan.c_str(), folder ? folder : "", &options, &engine, error, sizeof error) == PS_OK, error);
    const auto waited = [&](ps_status status) {
        while (status == PS_WAITING) status = ps_wait(engine);
        return status;
    };
    for (int pass = 0; pass < 60; ++pass) {
        failing = pass % 10 == 7;
        if (folder && dice() % 3 == 0) cool(folder);
        auto method = methods.begin();
        std::advance(method, dice() % methods.size());
        const int graph = method->first;
        int32_t probed[1000];
        const int32_t count = ps_probed(engine, graph, probed, 1000);
        const int leave = dice() % 6 ? count + 1 : static_cast<int>(dice() % (count + 1));
        ps_status status = waited(ps_begin(engine, graph));
        for (int32_t k = 0; k < count && status == PS_OK; ++k) {
            if (k == leave) break;
            status = waited(ps_acquire(engine, graph, probed[k]));
            if (status != PS_OK) break;
            for (const Read &one : method->second[probed[k]]) {
                const auto *bytes = static_cast<unsigned char *>(ps_storage(engine, one.storage));
                expect(!bytes || !std::memcmp(bytes, content[one.file].data() + one.offset, one.nbytes),
                       "pass " + std::to_string(pass) + " read other bytes of storage " + std::to_string(one.storage));
            }
            status = ps_release(engine, graph, probed[k]);
        }
        if (status == PS_OK && leave > count) status = waited(ps_end(engine, graph));
        else ps_abort(engine);
        if (status != PS_OK) {
            expect(status == PS_SOURCE, ps_error(engine));
            ps_abort(engine);
        }
        ps_statistics statistics;
        ps_stats(engine, &statistics);
        expect(statistics.misses == 0, "a planned order missed");
    }
    std::thread stopping([&] { ps_stop(engine); });
    ps_begin(engine, methods.begin()->first);
    stopping.join();
    ps_close(engine);
    for (const ps_file &one : files) close(one.fd);
    return 0;
}
