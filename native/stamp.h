// Recognises weight files by what a payload says of them, quickly at any size (docs/payload.md, "WeightFile").
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "plan.h"

namespace penstock {

// Raises PS_SOURCE unless an open file's header and sampled blocks have the payload's hashes. `direct_fd` reads past
// the page cache, or is negative: a small folio that a sample brought in would keep the granule around it from being
// mapped as one huge page.
void check_stamp(int fd, int direct_fd, const WeightFile &file, const std::string &path);

// The sha256 of bytes, as 64 hexadecimal digits.
std::string sha256(const std::string &bytes);

// That of bytes which come in pieces.
class Sha256 {
  public:
    void add(std::string_view bytes);
    std::string text();

  private:
    std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::string rest_;  // bytes of a block that is not whole yet
    uint64_t nbytes_ = 0;
};

// The files in place of an artifact whose ctime is the one at which all their bytes were last compared (`seen.json`).
std::map<std::string, int64_t> read_seen(const std::string &folder);

}  // namespace penstock
