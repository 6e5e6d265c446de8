// Drives a pool for the sanitizers: random units, late reads, failures, calls that end in the middle.
//
//     drive units PAYLOAD PLAN READS SEED
//
// READS has a line "graph step storage count stride nbytes start offset" for every read by units: the bytes from a unit to
// the next and those of a unit, and where the first begins in its storage and in the file, of which byte k has the value
// (7 k + k / 251) mod 256. Exit status 1 and a line on stderr where a unit that is held has other bytes.

#include "drive_units.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../native/penstock.h"

namespace {

std::atomic<bool> failing{false};
std::atomic<unsigned> reads{0};

unsigned char byte_at(int64_t k) { return static_cast<unsigned char>(7 * k + k / 251); }

int read_late(void *, int32_t, int64_t offset, void *address, int64_t nbytes) {
    const unsigned number = reads.fetch_add(1) * 2654435761u;
    if (number % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(number % 700));
    if (failing && number % 7 == 0) return 5;
    for (int64_t k = 0; k < nbytes; ++k) static_cast<unsigned char *>(address)[k] = byte_at(offset + k);
    return 0;
}

struct Read {
    int storage;
    int64_t count, stride, nbytes, offset;
};

void expect(bool right, const std::string &what) {
    if (right) return;
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

std::string text_of(const char *path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

struct Call {
    ps_engine *engine;
    int graph, step;
    const Read &read;
    std::mt19937 &dice;

    ps_status waited(ps_status status) const {
        while (status == PS_WAITING) status = ps_wait(engine);
        return status;
    }

    void check(const int64_t *units, int64_t count, int64_t start) const {
        const auto *const bytes = static_cast<unsigned char *>(ps_units_storage(engine, read.storage));
        for (int64_t k = 0; k < count; ++k)
            for (const int64_t at : {int64_t{0}, read.nbytes / 2, read.nbytes - 1})
                expect(bytes[start + units[k] * read.stride + at] == byte_at(read.offset + units[k] * read.stride + at),
                       "unit " + std::to_string(units[k]) + " of storage " + std::to_string(read.storage) + " has other bytes");
    }

    ps_status run(int64_t start) const {
        std::vector<int64_t> units;
        for (int64_t unit = 0; unit < read.count; ++unit)
            if (dice() % 3 == 0) units.push_back(unit);
        std::vector<int64_t> ends(units.size());
        int64_t parts = 0, first = 0;
        const auto asked = static_cast<int64_t>(units.size());
        ps_status status = ps_units_ask(engine, graph, step, units.data(), asked, ends.data(), &parts);
        for (int64_t k = 0; k < parts && status == PS_OK; first = ends[k++]) {
            const int64_t *const part = units.data() + first, count = ends[k] - first;
            status = ps_units_hold(engine, graph, step, part, count, parts < 2);
            if (status == PS_WAITING && dice() % 20 == 0) return status;  // as after an interrupt
            status = waited(status);
            if (status != PS_OK) break;
            check(part, count, start);
            status = ps_units_release(engine, graph, step, part, count);
        }
        return status;
    }
};

}  // namespace

int drive_units(char **arguments) {
    const std::string payload = text_of(arguments[0]), plan = text_of(arguments[1]);
    std::map<int, std::map<int, std::pair<Read, int64_t>>> methods;
    std::ifstream lines(arguments[2]);
    for (int graph, step; lines >> graph >> step;) {
        Read one;
        int64_t start;
        lines >> one.storage >> one.count >> one.stride >> one.nbytes >> start >> one.offset;
        methods[graph][step] = {one, start};
    }
    std::mt19937 dice(static_cast<unsigned>(std::atoi(arguments[3])));
    ps_options options{};
    options.readers = 1, options.debug = 1, options.patience_ms = static_cast<int32_t>(dice() % 2), options.read = read_late;
    ps_engine *engine;
    char error[1000];
    expect(ps_open(payload.c_str(), plan.c_str(), "", &options, &engine, error, sizeof error) == PS_OK, error);
    for (int pass = 0; pass < 60; ++pass) {
        failing = pass % 10 == 7;
        auto method = methods.begin();
        std::advance(method, dice() % methods.size());
        ps_status status = ps_begin(engine, method->first);
        for (const auto &[step, read] : method->second) {
            if (status != PS_OK || dice() % 20 == 0) break;
            status = Call{engine, method->first, step, read.first, dice}.run(read.second);
        }
        expect(status == PS_OK || status == PS_WAITING || status == PS_SOURCE, ps_error(engine));
        if (status == PS_OK) ps_end(engine, method->first);
        else ps_abort(engine);
        ps_statistics statistics;
        ps_units_stats(engine, &statistics);
        expect(statistics.held_bytes <= statistics.peak_bytes, "more is held than ever was");
    }
    std::thread stopping([&] { ps_stop(engine); });
    const auto &[graph, steps] = *methods.begin();
    if (ps_begin(engine, graph) == PS_OK)
        for (const auto &[step, read] : steps) Call{engine, graph, step, read.first, dice}.run(read.second);
    stopping.join();
    ps_close(engine);
    return 0;
}
