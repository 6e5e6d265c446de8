// Descriptors of files, and calls that a signal may interrupt.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <utility>

namespace penstock {

// A file descriptor, closed with this.
class Descriptor {
  public:
    explicit Descriptor(int fd = -1) : fd_(fd) {}
    Descriptor(Descriptor &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor &operator=(Descriptor &&other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    operator int() const { return fd_; }

  private:
    int fd_;
};

// Makes a call, again for as long as a signal interrupts it. It returns a number below 0 where it fails, as errno says.
template <typename Call>
auto uninterrupted(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// Opens a file. A pipe is opened too, to be refused, and not waited for.
inline Descriptor open_file(const std::string &path, int flags, mode_t mode = 0) {
    return Descriptor(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, mode); }));
}

// Writes all bytes: the system may take fewer at once. False where it refuses, as errno says.
inline bool write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t wrote = uninterrupted([&] { return ::write(fd, bytes.data(), bytes.size()); });
        if (wrote == 0) errno = ENOSPC;
        if (wrote <= 0) return false;
        bytes.remove_prefix(wrote);
    }
    return true;
}

}  // namespace penstock
