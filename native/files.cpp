#include "files.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

#include "failure.h"
#include "limits.h"
#include "memory.h"
#include "stamp.h"

namespace penstock {

namespace {

constexpr int64_t LARGEST_READ = 1 << 30, WINDOW = 2 << 20;
constexpr double WARM_FRACTION = 0.95;  // from which share of what a pass reads on the page cache has kept it

int64_t in_ns(const timespec &time) { return time.tv_sec * 1000000000LL + time.tv_nsec; }

int64_t modified_ns(const struct stat &status) { return in_ns(status.st_mtim); }

std::string in_words(int64_t start, int64_t stop, const std::string &path) {
    return "bytes " + std::to_string(start) + " to " + std::to_string(stop) + " of " + path;
}

// Memory for one read that goes elsewhere, aligned to pages.
class Scratch {
  public:
    explicit Scratch(size_t nbytes)
        : nbytes_(nbytes), address_(mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
        if (address_ == MAP_FAILED) throw Failure(PS_STREAM, "the system refused memory for a read: free some");
    }
    ~Scratch() { munmap(address_, nbytes_); }
    Scratch(const Scratch &) = delete;
    char *at(size_t offset) const { return static_cast<char *>(address_) + offset; }

  private:
    size_t nbytes_;
    void *address_;
};

// Tells whether a descriptor is of the file with this status: the path may have been renamed over meanwhile.
bool is_same_file(int fd, const struct stat &status) {
    struct stat found;
    return fstat(fd, &found) == 0 && found.st_dev == status.st_dev && found.st_ino == status.st_ino;
}

bool tells_cached(int fd) {
    struct stat status;
    return geteuid() == 0 || (fstat(fd, &status) == 0 && geteuid() == status.st_uid);
}

// The share of a window's pages that are in the page cache, by mincore(2); where that does not tell the truth, whether
// its first page can be read without waiting.
double cached_share_of_window(int fd, int64_t offset, int64_t nbytes) {
    if (!tells_cached(fd)) {
        char page[4096];
        iovec part{page, sizeof page};
        return preadv2(fd, &part, 1, offset, RWF_NOWAIT) > 0;
    }
    void *const window = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, fd, offset);
    if (window == MAP_FAILED) return 0;
    unsigned char pages[WINDOW / 4096];
    const int64_t count = round_up(nbytes, PAGE) / PAGE;
    const bool told = mincore(window, nbytes, pages) == 0;
    munmap(window, nbytes);
    const auto found = std::count_if(pages, pages + count, [](unsigned char one) { return one & 1; });
    return told ? static_cast<double>(found) / static_cast<double>(count) : 0;
}

// The share of a file that the page cache holds, by some windows of it.
double cached_share(int fd, int64_t nbytes, int64_t windows) {
    const int64_t count = std::min(windows, (nbytes + WINDOW - 1) / WINDOW), last = std::max<int64_t>(0, nbytes - WINDOW);
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t offset = round_down(last * i / std::max<int64_t>(1, count - 1), PAGE);
        sum += cached_share_of_window(fd, offset, std::min(WINDOW, nbytes - offset));
    }
    return count ? sum / static_cast<double>(count) : 0;
}

// The alignment of direct reads, 0 where there are none: some file systems take the flag and refuse the reads.
int64_t find_block(int fd) {
    Scratch memory(2 * 4096);
    for (const int64_t block : {512, 4096}) {
        if (uninterrupted([&] { return pread(fd, memory.at(block), block, 0); }) >= 0) return block;
        if (errno != EINVAL) break;
    }
    return 0;
}

}  // namespace

Source::Source(const Plan &plan, const std::string &folder, const ps_options &options)
    : count_(static_cast<int>(plan.files.size())), callback_(options.read), context_(options.context) {
    if (plan.spills && !options.spill)
        throw Failure(PS_PLAN, "what the program keeps leaves memory by this plan, and there is no file for it");
    if (options.spill) {
        const ps_spill &given = *options.spill;
        Descriptor fd(fcntl(given.fd, F_DUPFD_CLOEXEC, 0));
        Descriptor direct(given.block ? fcntl(given.direct_fd, F_DUPFD_CLOEXEC, 0) : -1);
        if (fd < 0 || (given.block && direct < 0))
            throw Failure(PS_SOURCE, "the system refused a descriptor: raise its limit on open files (ulimit -n)");
        spill_ = std::make_unique<Open>(
            Open{"a file in " + std::string(given.folder) + ", the folder for values that leave memory,", given.nbytes, std::move(fd), std::move(direct), 0, given.block, true});
    }
    std::copy_if(plan.storages.begin(), plan.storages.end(), std::back_inserter(hashed_),
                 [](const Storage &one) { return !one.sha256.empty(); });
    for (size_t k = 0; k < plan.files.size() && !callback_; ++k)
        open(plan.files[k], folder, options.opened ? options.opened + k : nullptr, !options.buffered);
    if (options.opened)
        check_unchanged();
    else if (!callback_)
        compare_unseen(plan.files, folder);
    // What stays outside the arena is not read here.
    const int64_t first = nbytes() - plan.outside_bytes;
    if (!callback_ && !options.buffered && plan.repeated_bytes && !plan.mapped)
        keeping_ = std::make_unique<Keeping>(*this, plan.repeated_bytes, first, options.available);
}

Source::~Source() = default;

void Source::open(const WeightFile &file, const std::string &folder, const ps_file *opened, bool direct) {
    const bool in_place = !file.path.empty() && file.path[0] == '/';
    const std::string inside = "/" + file.path + "/";
    if (file.path.empty() || inside.find("/../") != std::string::npos)
        throw Failure(PS_SOURCE, "the payload names the weight file '" + file.path + "', which is not inside " +
                                     folder + ": do not trust this artifact, compile again");
    const std::string path = in_place ? file.path : folder + "/" + file.path;
    Descriptor fd = opened ? Descriptor(fcntl(opened->fd, F_DUPFD_CLOEXEC, 0)) : open_file(path, O_RDONLY);
    if (fd < 0)
        throw Failure(PS_SOURCE, path + " cannot be opened (" + std::strerror(errno) + "): put the file back");
    Open one{path, file.nbytes, std::move(fd), Descriptor()};
    struct stat status;
    if (fstat(one.fd, &status) != 0)
        throw Failure(PS_SOURCE, path + " cannot be asked for its size (" + std::strerror(errno) + ")");
    one.number = static_cast<int>(files_.size());
    one.mtime_ns = opened ? opened->mtime_ns : modified_ns(status);
    one.ctime_ns = opened ? opened->ctime_ns : in_ns(status.st_ctim);
    const bool other_times = modified_ns(status) != file.mtime_ns || static_cast<int64_t>(status.st_ino) != file.inode;
    if (!opened && (status.st_size != file.nbytes || (in_place && other_times)))
        throw Failure(PS_SOURCE, path + " is not the file that was compiled: its size, time or inode differ; put "
                                        "the original back, or compile again");
    if (direct) {
        one.direct_fd = open_file(path, O_RDONLY | O_DIRECT);
        one.block = one.direct_fd >= 0 && is_same_file(one.direct_fd, status) ? find_block(one.direct_fd) : 0;
    }
    if (!opened) check_stamp(one.fd, one.block ? static_cast<int>(one.direct_fd) : -1, file, path);
    files_.push_back(std::move(one));
}

bool Source::direct() const {
    return std::all_of(files_.begin(), files_.end(), [](const Open &one) { return one.block > 0; });
}

bool Source::tells_cached() const {
    return std::all_of(files_.begin(), files_.end(),
                       [](const Open &one) { return penstock::tells_cached(one.fd); });
}

int64_t Source::nbytes() const {
    int64_t sum = 0;
    for (const Open &one : files_) sum = add_size(sum, one.nbytes);
    return sum;
}

double Source::cached_fraction() const {
    const int64_t total = nbytes(), windows = std::max<int64_t>(4, 128 / std::max<size_t>(1, files_.size()));
    double cached = 0;
    for (const Open &one : files_) cached += cached_share(one.fd, one.nbytes, windows) * static_cast<double>(one.nbytes);
    return total ? cached / static_cast<double>(total) : 0;
}

void Keeping::count(int64_t nbytes) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        left_ -= nbytes;
        if (left_ > 0 || !tries_) return;
        left_ = nbytes_;
    }
    const double kept = source_.cached_fraction() * static_cast<double>(source_.nbytes());
    const int64_t room = available_ ? available_ : available_bytes();
    if (through_ && kept < WARM_FRACTION * static_cast<double>(nbytes_)) --tries_;
    through_ = static_cast<double>(nbytes_) - kept <= static_cast<double>(room) && tries_ > 0;
}

void Source::check_unchanged() const {
    for (const Open &file : files_) check_unchanged(file);
}

void Source::check_unchanged(const Open &file) const {
    if (file.spill) return;
    struct stat status;
    if (fstat(file.fd, &status) != 0)
        throw Failure(PS_SOURCE, file.path + " cannot be asked whether it has changed (" + std::strerror(errno) +
                                     "): check the disk, then try again");
    if (status.st_size < file.nbytes)
        throw Failure(PS_SOURCE, file.path + " has been truncated while in use: expected " +
                                     std::to_string(file.nbytes) + " bytes; restore the file and open the artifact again");
    if (status.st_size != file.nbytes || modified_ns(status) != file.mtime_ns)
        throw Failure(PS_SOURCE, file.path + " has been changed while in use: open the artifact again");
    // Whoever writes can put the other times back. A ctime changes without a write too: only the bytes tell.
    std::lock_guard<std::mutex> guard(comparing_);
    if (in_ns(status.st_ctim) == file.ctime_ns) return;
    if (!holds_its_weights(file))
        throw Failure(PS_SOURCE, file.path + " has been changed while in use: the sha256 of a weight differs; open the "
                                             "artifact again");
    file.ctime_ns = in_ns(status.st_ctim);
}

bool Source::holds_its_weights(const Open &file) const {
    std::string bytes;
    for (const Storage &storage : hashed_) {
        const auto here = [&](const Extent &one) { return one.file == file.number; };
        if (std::none_of(storage.extents.begin(), storage.extents.end(), here)) continue;
        Sha256 digest;
        for (const Extent &extent : storage.extents)
            for (int64_t done = 0; done < extent.nbytes; done += static_cast<int64_t>(bytes.size())) {
                bytes.resize(std::min(extent.nbytes - done, WINDOW));
                const int64_t offset = extent.file_offset + done;
                const ssize_t got = uninterrupted(
                    [&] { return pread(files_[extent.file].fd, bytes.data(), bytes.size(), offset); });
                if (got <= 0) return false;
                bytes.resize(got);
                digest.add(bytes);
            }
        if (digest.text() != storage.sha256) return false;
    }
    return true;
}

void Source::compare_unseen(const std::vector<WeightFile> &files, const std::string &folder) const {
    const std::map<std::string, int64_t> seen = read_seen(folder);
    for (const Open &file : files_) {
        const std::string &path = files[file.number].path;
        const auto found = seen.find(path);
        if (path[0] != '/' || (found != seen.end() && found->second == file.ctime_ns)) continue;
        if (!holds_its_weights(file))
            throw Failure(PS_SOURCE, file.path + " is not the file that was compiled: the sha256 of a weight differs; put "
                                                 "the original back, or compile again");
    }
}

void Source::read(int file, int64_t offset, char *address, int64_t nbytes) const {
    if (nbytes <= 0) return;
    const bool spill = file == count_;
    if (spill && !spill_)
        throw Failure(PS_PLAN, "the plan reads back what it never copies out: plan again");
    if (callback_ && !spill) {
        const int error = callback_(context_, file, offset, address, nbytes);
        if (error) throw Failure(PS_SOURCE, "reading weights failed (" + std::string(std::strerror(error)) + ")");
        return;
    }
    const Open &opened = spill ? *spill_ : files_[file];
    const bool through = !spill && keeping_ && keeping_->goes_through_cache();
    if (through) posix_fadvise(opened.fd, offset, nbytes, POSIX_FADV_WILLNEED);
    if (through || !opened.block) {
        read_plainly(opened, opened.fd, offset, address, nbytes);
    } else if ((offset - reinterpret_cast<intptr_t>(address)) % opened.block == 0) {
        const int64_t head = std::min((opened.block - offset % opened.block) % opened.block, nbytes);
        const int64_t whole = (nbytes - head) / opened.block * opened.block, done = head + whole;
        read_plainly(opened, opened.fd, offset, address, head);
        read_plainly(opened, opened.direct_fd, offset + head, address + head, whole);
        read_plainly(opened, opened.fd, offset + done, address + done, nbytes - done);
    } else if (!read_and_move(opened, offset, address, nbytes)) {
        read_plainly(opened, opened.fd, offset, address, nbytes);
    }
    // Only after the read does this say that all its bytes are those of the file that was opened.
    check_unchanged(opened);
    if (keeping_ && !spill) keeping_->count(nbytes);
}

void Source::write(int64_t offset, const char *address, int64_t nbytes) const {
    const int64_t block = spill_->block, unit = std::max(block, PAGE);
    int64_t head = nbytes, whole = 0;
    // Past the page cache, which would hold them beside the budget. Pages, and not blocks: a page of which one thread
    // writes a part past the cache, while another writes the rest through it, may lose either.
    if (block && (offset - reinterpret_cast<intptr_t>(address)) % block == 0) {
        head = std::min((unit - offset % unit) % unit, nbytes);
        whole = (nbytes - head) / unit * unit;
    }
    const int64_t done = head + whole;
    write_plainly(spill_->fd, offset, address, head);
    write_plainly(spill_->direct_fd, offset + head, address + head, whole);
    write_plainly(spill_->fd, offset + done, address + done, nbytes - done);
}

void Source::write_plainly(int fd, int64_t offset, const char *address, int64_t nbytes) const {
    for (int64_t done = 0; done < nbytes;) {
        const ssize_t wrote = uninterrupted(
            [&] { return pwrite(fd, address + done, std::min(nbytes - done, LARGEST_READ), offset + done); });
        if (wrote <= 0) {
            const std::string why = wrote ? std::strerror(errno) : "no byte was written";
            throw Failure(PS_SOURCE, "writing " + std::to_string(nbytes) + " bytes to " + spill_->path + " failed (" + why +
                                         "): free some room there, or name another folder with load(spill=...)");
        }
        done += wrote;
    }
}

// Reads all blocks that hold the bytes at once and directly; false where some did not come. The first block and the
// last ones go to memory of their own, those between into the range itself, behind where they belong.
bool Source::read_and_move(const Open &file, int64_t offset, char *address, int64_t nbytes) const {
    const int64_t block = file.block, first = offset / block * block;
    char *const stop = address + nbytes, *const start = address + (first + block - offset);  // of the second block
    char *const place = reinterpret_cast<char *>((reinterpret_cast<intptr_t>(start) + block - 1) / block * block);
    const int64_t whole = std::max<int64_t>(0, (stop - place) / block * block);
    const int64_t rest = std::max<int64_t>(0, stop - (start + whole));
    Scratch edges(4 * block);
    std::vector<iovec> parts{{edges.at(0), static_cast<size_t>(block)}};
    if (whole) parts.push_back({place, static_cast<size_t>(whole)});
    parts.push_back({edges.at(block), static_cast<size_t>((rest + block - 1) / block * block)});
    const ssize_t got = uninterrupted(
        [&] { return preadv(file.direct_fd, parts.data(), static_cast<int>(parts.size()), first); });
    if (got < offset + nbytes - first) return false;  // a plain read says why, if it fails as well
    std::memmove(start, place, whole);
    const int64_t skipped = offset - first;
    std::memcpy(address, edges.at(skipped), std::min<int64_t>(nbytes, start - address));
    std::memcpy(start + whole, edges.at(block), rest);
    return true;
}

void Source::read_plainly(const Open &file, int fd, int64_t offset, char *address, int64_t nbytes) const {
    const int64_t stop = offset + nbytes;
    while (offset < stop) {
        const ssize_t got =
            uninterrupted([&] { return pread(fd, address, std::min(stop - offset, LARGEST_READ), offset); });
        if (got < 0) {
            const int error = errno;
            check_unchanged(file);  // behind a new end in the middle of a block a direct read fails with EINVAL
            throw Failure(PS_SOURCE, "reading " + in_words(offset, stop, file.path) + " failed (" + std::strerror(error) +
                                         (file.spill ? "); name another folder with load(spill=...)"
                                                     : "); check the disk, then try again"));
        }
        if (got == 0) {
            check_unchanged(file);
            throw Failure(PS_SOURCE, file.path + " ended at byte " + std::to_string(offset) + " while it was read" +
                                         (file.spill ? ": name another folder with load(spill=...)" : ""));
        }
        offset += got;
        address += got;
    }
}

FileRanges::FileRanges(const std::vector<Storage> &storages, const std::vector<int64_t> &layout,
                       const std::vector<int64_t> &places, int64_t gap) {
    std::vector<FileRange> all;
    for (size_t s = 0; s < storages.size(); ++s) {
        if (places[s] < 0) continue;
        for (const Extent &one : storages[s].extents) {
            const int64_t start = layout[s] + one.storage_offset;
            if (one.nbytes)
                all.push_back({{start, start + one.nbytes}, one.file, one.file_offset, places[s] + one.storage_offset});
        }
    }
    std::sort(all.begin(), all.end(), [](const FileRange &a, const FileRange &b) { return a.range < b.range; });
    for (const FileRange &one : all) {
        FileRange *const last = ranges_.empty() ? nullptr : &ranges_.back();
        const int64_t step = last ? one.range.start - last->range.start : 0;
        if (last && one.file == last->file && one.file_offset - last->file_offset == step &&
            one.place - last->place == step && one.range.start - last->range.stop <= gap) {
            last->range.stop = std::max(last->range.stop, one.range.stop);
            continue;
        }
        if (last && one.range.start < last->range.stop)
            throw Failure(PS_PLAN, "two storages lie at layout offset " + std::to_string(one.range.start) +
                                       ": plan it again");
        ranges_.push_back(one);
    }
}

}  // namespace penstock
