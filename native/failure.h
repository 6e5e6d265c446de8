// What goes wrong, as one exception inside the library; the C functions turn it into a status and a sentence.
#pragma once

#include <stdexcept>
#include <string>

#include "penstock.h"

namespace penstock {

// A failure as it is kept between threads, which must not share the text of an exception.
struct Sentence {
    ps_status status;
    std::string text;
};

struct Failure : std::runtime_error {
    Failure(ps_status status, const std::string &text) : std::runtime_error(text), status(status) {}
    explicit Failure(const Sentence &sentence) : Failure(sentence.status, sentence.text) {}
    ps_status status;
};

}  // namespace penstock
