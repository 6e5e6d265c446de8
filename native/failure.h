// What goes wrong, as one exception inside the library; the C functions turn it into a status and a sentence.
#pragma once

#include <new>
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

// Returns the status and the text of the exception that is being handled. It raises nothing, even without memory: an
// exception that leaves a thread or a C function ends the process.
inline Sentence caught() noexcept {
    try {
        try {
            throw;
        } catch (const Failure &failure) {
            return {failure.status, failure.what()};
        } catch (const std::bad_alloc &) {
            return {PS_STREAM, "there is not enough memory: lower the budget or free some"};
        } catch (const std::exception &other) {
            return {PS_STREAM, other.what()};
        } catch (...) {
            return {PS_STREAM, "an error of another library, which says nothing about it"};
        }
    } catch (...) {
        return {PS_STREAM, "out of memory"};  // so short that it needs none
    }
}

}  // namespace penstock
