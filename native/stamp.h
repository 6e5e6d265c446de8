// Recognises weight files by what a payload says of them, quickly at any size (docs/payload.md, "WeightFile").
#pragma once

#include <string>

#include "plan.h"

namespace penstock {

// Raises PS_SOURCE unless an open file's header and sampled blocks have the payload's hashes. `direct_fd` reads past
// the page cache, or is negative: a small folio that a sample brought in would keep the granule around it from being
// mapped as one huge page.
void check_stamp(int fd, int direct_fd, const WeightFile &file, const std::string &path);

// The sha256 of bytes, as 64 hexadecimal digits.
std::string sha256(const std::string &bytes);

}  // namespace penstock
