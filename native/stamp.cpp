#include "stamp.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "descriptor.h"
#include "failure.h"
#include "json.h"

namespace penstock {

namespace {

constexpr int64_t SAMPLE = 4096, LARGE_TENSOR = 1 << 20, HEADER_LIMIT = 100'000'000, PREFIX = 8;
constexpr int64_t SPREAD_SAMPLES = 64, TENSOR_SAMPLES = 256;

// FIPS 180-4.
constexpr std::array<uint32_t, 64> ROUNDS{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

void mix(std::array<uint32_t, 8> &state, const unsigned char *block) {
    std::array<uint32_t, 64> words{};
    for (int k = 0; k < 16; ++k)
        words[k] = static_cast<uint32_t>(block[4 * k]) << 24 | block[4 * k + 1] << 16 | block[4 * k + 2] << 8 |
                   block[4 * k + 3];
    for (int k = 16; k < 64; ++k) {
        const uint32_t a = words[k - 15], b = words[k - 2];
        words[k] = words[k - 16] + words[k - 7] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) +
                   (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int k = 0; k < 64; ++k) {
        const uint32_t one =
            h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS[k] + words[k];
        const uint32_t two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
    for (int k = 0; k < 8; ++k) state[k] += added[k];
}

[[noreturn]] void other(const std::string &path, const char *what) {
    throw Failure(PS_SOURCE, path + " is not the file that was compiled: its " + what +
                                 " differs; put the original back, or compile again");
}

std::string read_exactly(int fd, int64_t offset, int64_t nbytes, const std::string &path) {
    std::string bytes(nbytes, 0);
    for (int64_t done = 0; done < nbytes;) {
        const ssize_t got = uninterrupted([&] { return pread(fd, &bytes[done], nbytes - done, offset + done); });
        if (got < 0)
            throw Failure(PS_SOURCE, "reading " + path + " failed (" + std::strerror(errno) +
                                         "); check the disk, then try again");
        if (got == 0) other(path, "size in bytes");
        done += got;
    }
    return bytes;
}

// The header's length and JSON, as they are in the file.
std::string read_header(int fd, const WeightFile &file, const std::string &path) {
    if (file.nbytes < PREFIX) other(path, "header");
    const std::string prefix = read_exactly(fd, 0, PREFIX, path);
    uint64_t length = 0;
    for (int k = PREFIX - 1; k >= 0; --k) length = length << 8 | static_cast<unsigned char>(prefix[k]);
    if (length > static_cast<uint64_t>(std::min(HEADER_LIMIT, file.nbytes - PREFIX))) other(path, "header");
    return prefix + read_exactly(fd, PREFIX, static_cast<int64_t>(length), path);
}

// Where the sampled blocks begin: 64 spread evenly, and those in which up to 256 large tensors begin.
std::set<int64_t> sample_offsets(const std::string &header, int64_t nbytes, const std::string &path) {
    std::vector<std::pair<int64_t, int64_t>> tensors;
    try {
        const Json fields = parse_json(header.substr(PREFIX), path);
        for (const auto &[name, entry] : fields.items()) {
            if (name == "__metadata__") continue;
            const auto &ends = entry.at("data_offsets");
            tensors.emplace_back(ends.at(0), ends.at(1));
        }
    } catch (const Json::exception &) {
        other(path, "header");
    }
    std::sort(tensors.begin(), tensors.end());
    std::vector<int64_t> large;
    const auto data = static_cast<int64_t>(header.size());
    for (const auto &[start, stop] : tensors) {
        if (start < 0 || stop < start || stop > nbytes - data) other(path, "header");
        if (stop - start >= LARGE_TENSOR) large.push_back(data + start);
    }
    std::set<int64_t> offsets;
    const int64_t last = std::max<int64_t>(nbytes - 1, 0), count = static_cast<int64_t>(large.size());
    const int64_t chosen = std::min(count, TENSOR_SAMPLES);
    for (int64_t i = 0; i < SPREAD_SAMPLES; ++i) offsets.insert(last * i / (SPREAD_SAMPLES - 1) / SAMPLE * SAMPLE);
    for (int64_t i = 0; i < chosen; ++i) offsets.insert(large[count * i / chosen] / SAMPLE * SAMPLE);
    return offsets;
}

}  // namespace

std::string sha256(const std::string &bytes) {
    Sha256 digest;
    digest.add(bytes);
    return digest.text();
}

void Sha256::add(std::string_view bytes) {
    nbytes_ += bytes.size();
    rest_ += bytes;
    const auto *const data = reinterpret_cast<const unsigned char *>(rest_.data());
    const size_t whole = rest_.size() / 64 * 64;
    for (size_t at = 0; at < whole; at += 64) mix(state_, data + at);
    rest_.erase(0, whole);
}

std::string Sha256::text() {
    const uint64_t bits = nbytes_ * 8;
    std::string tail(rest_.size() < 56 ? 64 - rest_.size() : 128 - rest_.size(), 0);
    tail[0] = static_cast<char>(0x80);
    for (int k = 0; k < 8; ++k) tail[tail.size() - 1 - k] = static_cast<char>(bits >> 8 * k);
    add(tail);
    std::string text;
    for (const uint32_t word : state_)
        for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
}

void check_stamp(int fd, int direct_fd, const WeightFile &file, const std::string &path) {
    const std::string header = read_header(fd, file, path);
    if (sha256(header) != file.header_sha256) other(path, "sha256 of its header");
    std::string samples;
    alignas(SAMPLE) char block[SAMPLE];
    for (const int64_t offset : sample_offsets(header, file.nbytes, path)) {
        const int64_t nbytes = std::min(SAMPLE, file.nbytes - offset);
        const bool whole = direct_fd >= 0 && pread(direct_fd, block, SAMPLE, offset) >= nbytes;
        samples += whole ? std::string(block, nbytes) : read_exactly(fd, offset, nbytes, path);
    }
    if (sha256(samples) != file.sampled_sha256) other(path, "sha256 of its sampled blocks");
}

std::map<std::string, int64_t> read_seen(const std::string &folder) {
    constexpr size_t MOST = 16 << 20;
    const Descriptor fd = open_file(folder + "/seen.json", O_RDONLY | O_NONBLOCK);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return {};
    std::string text(std::min<size_t>(status.st_size, MOST), 0);
    const ssize_t got = uninterrupted([&] { return pread(fd, text.data(), text.size(), 0); });
    try {
        const auto json = parse_json(text.substr(0, std::max<ssize_t>(got, 0)), "seen.json");
        std::map<std::string, int64_t> seen;
        for (const auto &[path, ctime_ns] : json.items()) seen[path] = ctime_ns;
        return seen;
    } catch (const nlohmann::json::exception &) {
        return {};  // what is damaged says nothing
    } catch (const Failure &) {
        return {};
    }
}

}  // namespace penstock
