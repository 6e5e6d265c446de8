// The weight files, and which of their bytes belong where in memory.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "descriptor.h"
#include "penstock.h"
#include "plan.h"

namespace penstock {

class Keeping;

// Where reads come from: the engine's own descriptors, or a function of the caller's. From any number of threads.
class Source {
  public:
    Source(const Plan &plan, const std::string &folder, const ps_options &options);
    ~Source();

    // Fills memory with bytes of a file. Raises PS_SOURCE where they cannot be had, or may be another file's.
    void read(int file, int64_t offset, char *address, int64_t nbytes) const;

    // Writes memory to the spill file, whose number is that behind the last file. Raises PS_SOURCE.
    void write(int64_t offset, const char *address, int64_t nbytes) const;

    // Raises PS_SOURCE where a file has been truncated or written to since it was opened (one fstat each).
    void check_unchanged() const;
    void check_unchanged(int file) const { check_unchanged(files_[file]); }

    // Whether there are files to map, whether all can be read past the page cache, and whether mincore(2) tells the
    // truth about all: for a file that the process neither owns nor may write Linux says that all of it is cached.
    bool maps() const { return !callback_; }
    bool direct() const;
    bool tells_cached() const;

    int fd(int file) const { return files_[file].fd; }
    const std::string &path(int file) const { return files_[file].path; }
    int64_t nbytes() const;  // of all files

    // The share of all files that the page cache holds, from 0 to 1, estimated without reading; 0 where nobody tells.
    double cached_fraction() const;

  private:
    struct Open {
        std::string path;
        int64_t nbytes;
        Descriptor fd, direct_fd;
        int64_t mtime_ns = 0;  // when it was opened
        int64_t block = 0;     // to which direct reads are aligned, 0 where there are none
        bool spill = false;    // which is written all the time
        int number = 0;
        mutable int64_t ctime_ns = 0;  // when its bytes were last compared; guarded by `comparing_`
    };

    void open(const WeightFile &file, const std::string &folder, const ps_file *opened, bool direct);
    void check_unchanged(const Open &file) const;
    bool holds_its_weights(const Open &file) const;
    void compare_unseen(const std::vector<WeightFile> &files, const std::string &folder) const;
    void write_plainly(int fd, int64_t offset, const char *address, int64_t nbytes) const;
    void read_plainly(const Open &file, int fd, int64_t offset, char *address, int64_t nbytes) const;
    bool read_and_move(const Open &file, int64_t offset, char *address, int64_t nbytes) const;

    std::vector<Open> files_;
    std::vector<Storage> hashed_;  // of which the payload has a hash
    mutable std::mutex comparing_;
    const int count_;  // of the payload's files, which `callback_` may read
    std::unique_ptr<Open> spill_;
    ps_read callback_;
    void *context_;
    std::unique_ptr<Keeping> keeping_;
};

// Decides after each pass whether reads go through the page cache. At first they go past it, which is the faster way
// to read bytes once. Later they go through it if available memory has room for the bytes that every pass reads: a
// pass then takes a copy, and no read of the disk. If the cache did not keep them, reads go past it again.
class Keeping {
  public:
    // `nbytes` are read in every pass, `first` in the first one. `available` is that of ps_options.
    Keeping(const Source &source, int64_t nbytes, int64_t first, int64_t available)
        : source_(source), nbytes_(nbytes), available_(available), left_(first) {}

    bool goes_through_cache() const { return through_; }

    // Counts bytes that were read; if they complete a pass, decides how the next one reads.
    void count(int64_t nbytes);

  private:
    const Source &source_;
    const int64_t nbytes_, available_;
    std::mutex lock_;
    int64_t left_;
    std::atomic<int> tries_{2};
    std::atomic<bool> through_{false};
};

// Layout bytes, which lie at `file_offset` of a file and at byte `place` of the arena.
struct FileRange {
    Range range;
    int file;
    int64_t file_offset, place;

    FileRange cut(Range to) const {
        const int64_t skip = std::max<int64_t>(0, to.start - range.start);
        return {{range.start + skip, std::min(to.stop, range.stop)}, file, file_offset + skip, place + skip};
    }
};

// The bytes of all storages in the arena, as ranges that one read each can fill. Neighbours in file and memory, at
// most `gap` bytes apart, are one range: what lies between is read along.
class FileRanges {
  public:
    // Storage s begins at layout offset `layout[s]` and at byte `places[s]` of the memory, or has no place if that is negative.
    FileRanges(const std::vector<Storage> &storages, const std::vector<int64_t> &layout,
               const std::vector<int64_t> &places, int64_t gap);

    template <typename Use>
    void within(Range range, Use use) const {
        auto one = std::upper_bound(ranges_.begin(), ranges_.end(), range.start,
                                    [](int64_t at, const FileRange &other) { return at < other.range.stop; });
        for (; one != ranges_.end() && one->range.start < range.stop; ++one) use(one->cut(range));
    }

  private:
    std::vector<FileRange> ranges_;
};

}  // namespace penstock
