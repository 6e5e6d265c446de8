#include "safetensors.h"

#include <dirent.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>

#include "../descriptor.h"
#include "../json.h"
#include "../limits.h"

namespace penstock {

using Header = JsonOf<nlohmann::ordered_map>;  // in the order of the file

namespace {

constexpr int64_t LARGEST_HEADER = 100'000'000;

struct Dtype {
    const char *torch, *stored;
    int64_t nbytes;
};

constexpr Dtype DTYPES[] = {
    {"bool", "BOOL", 1},          {"uint8", "U8", 1},
    {"int8", "I8", 1},            {"float8_e5m2", "F8_E5M2", 1},
    {"float8_e4m3fn", "F8_E4M3", 1}, {"float8_e8m0fnu", "F8_E8M0", 1},
    {"int16", "I16", 2},          {"uint16", "U16", 2},
    {"float16", "F16", 2},        {"bfloat16", "BF16", 2},
    {"int32", "I32", 4},          {"uint32", "U32", 4},
    {"float32", "F32", 4},        {"int64", "I64", 8},
    {"uint64", "U64", 8},         {"float64", "F64", 8},
    {"complex64", "C64", 8},
};

const Dtype *find_dtype(const std::string &name, bool stored) {
    const auto found = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Dtype &one) {
        return name == (stored ? one.stored : one.torch);
    });
    return found == std::end(DTYPES) ? nullptr : found;
}

[[noreturn]] void refuse(const std::string &path, const std::string &why) {
    throw Failure(PS_SOURCE, path + " is no safetensors file: " + why);
}

[[noreturn]] void refuse_system(const std::string &path, const char *what) {
    throw Failure(PS_SOURCE, path + " could not be " + what + " (" + std::strerror(errno) + ")");
}

TensorPlace place_of(const std::string &name, const Header &json, int64_t data, int64_t file_nbytes,
                     const std::string &path) {
    const Dtype *const dtype = find_dtype(json.at("dtype"), true);
    if (!dtype) refuse(path, "tensor " + name + " has the unknown dtype " + json.at("dtype").dump());
    const auto offsets = json.at("data_offsets").get<std::vector<int64_t>>();
    TensorPlace place{name, dtype->torch, json.at("shape"), 0, 0};
    int64_t nbytes = dtype->nbytes;
    for (const int64_t size : place.shape)
        if (size < 0 || __builtin_mul_overflow(nbytes, size, &nbytes)) refuse(path, "tensor " + name + " has no size");
    if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0] || offsets[1] > file_nbytes - data ||
        offsets[1] - offsets[0] != nbytes)
        refuse(path, "tensor " + name + " lies outside of it, or has another size than its shape");
    place.start = data + offsets[0], place.stop = data + offsets[1];
    return place;
}

Descriptor open_to_read(const std::string &path) {
    Descriptor fd = open_file(path, O_RDONLY);
    if (fd < 0) refuse_system(path, "opened");
    return fd;
}

int64_t size_of(int fd, const std::string &path) {
    struct stat status;
    if (fstat(fd, &status) != 0) refuse_system(path, "read");
    if (!S_ISREG(status.st_mode)) throw Failure(PS_SOURCE, path + " is no file");
    return status.st_size;
}

// Room for bytes of a file, whose size may be that of a hole: the system grants memory, and kills who writes too much of it.
std::string make_room(int64_t nbytes, const std::string &path) {
    const int64_t available = available_bytes();
    if (nbytes > available)
        throw Failure(PS_SOURCE, path + " has " + std::to_string(nbytes) + " bytes to be read at once, and " +
                                     std::to_string(available) + " bytes of memory are available: free some");
    return std::string(nbytes, 0);
}

// Removes the files that killed runs left: whoever is at work holds a lock on theirs. Their names are `prefix` and
// eight hexadecimal digits; other names, links and pipes are somebody's own.
void remove_stale(const std::string &folder, const std::string &prefix) {
    DIR *const names = opendir(folder.c_str());
    if (!names) return;
    while (const dirent *const one = readdir(names)) {
        const std::string path = folder + one->d_name;
        const std::string name = one->d_name;
        if (name.compare(0, prefix.size(), prefix) != 0 || name.size() != prefix.size() + 8 ||
            name.find_first_not_of("0123456789abcdef", prefix.size()) != std::string::npos)
            continue;
        const Descriptor fd = open_file(path, O_RDONLY | O_NOFOLLOW);
        struct stat status;
        if (fd >= 0 && fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
            uninterrupted([&] { return flock(fd, LOCK_EX | LOCK_NB); }) == 0)
            unlink(path.c_str());
    }
    closedir(names);
}

// A file beside its target, under a name like those of Python's atomic files, that is removed unless it was renamed.
class Temporary {
  public:
    explicit Temporary(const std::string &target) : target_(target) {
        const size_t slash = target.rfind('/');
        folder_ = slash == std::string::npos ? "./" : target.substr(0, slash + 1);
        prefix_ = "." + (slash == std::string::npos ? target : target.substr(slash + 1)) + ".tmp-";
    }
    // What the system refuses to remove, the next run removes.
    ~Temporary() {
        if (!path_.empty()) unlink(path_.c_str());
    }

    void create() {
        remove_stale(folder_, prefix_);
        do {
            path_.clear();
            char digits[9];
            std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(std::random_device()()));
            const std::string path = folder_ + prefix_ + digits;
            fd_ = open_file(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
            if (fd_ < 0) refuse();
            path_ = path;
            lock();
        } while (!is_there());
    }

    void write(const std::string &data) const {
        if (!write_all(fd_, data)) refuse();
    }

    void become(bool force) {
        if (uninterrupted([&] { return fsync(fd_); }) != 0) refuse();
        // A link fails where somebody has made the file meanwhile.
        if ((force ? rename(path_.c_str(), target_.c_str()) : link(path_.c_str(), target_.c_str())) != 0) refuse();
        if (force) path_.clear();
        const Descriptor folder = open_file(folder_, O_RDONLY | O_DIRECTORY);
        if (folder < 0 || uninterrupted([&] { return fsync(folder); }) != 0)
            throw Failure(PS_SOURCE, target_ + " is written, and the system does not say that the disk has it (" +
                                         std::strerror(errno) + "): check the disk, then write it again with --force");
    }

  private:
    [[noreturn]] void refuse() const { refuse_system(target_, "written"); }

    // A lock on a file system without locks will do: nobody can then take the file for stale.
    void lock() const {
        const bool locked = uninterrupted([&] { return flock(fd_, LOCK_EX); }) == 0;
        const int without[] = {ENOSYS, EOPNOTSUPP, EINVAL, ENOLCK};
        if (!locked && std::count(std::begin(without), std::end(without), errno) == 0) refuse();
    }

    // Another run may have taken it for stale between its creation and its lock.
    bool is_there() const {
        struct stat named, opened;
        if (fstat(fd_, &opened) != 0) refuse();
        if (stat(path_.c_str(), &named) == 0) return named.st_ino == opened.st_ino;
        if (errno != ENOENT) refuse();
        return false;
    }

    const std::string target_;
    std::string folder_, prefix_, path_;
    Descriptor fd_;
};

}  // namespace

int64_t item_nbytes(const std::string &dtype) {
    const Dtype *const found = find_dtype(dtype, false);
    return found ? found->nbytes : 0;
}

void read_exactly(int fd, const std::string &path, int64_t offset, void *address, int64_t nbytes) {
    for (int64_t done = 0; done < nbytes;) {
        const ssize_t got = uninterrupted(
            [&] { return pread(fd, static_cast<char *>(address) + done, nbytes - done, offset + done); });
        if (got < 0) refuse_system(path, "read");
        if (got == 0) throw Failure(PS_SOURCE, path + " ends too early: it has been truncated");
        done += got;
    }
}

std::string read_file(const std::string &path) {
    const Descriptor fd = open_to_read(path);
    std::string data = make_room(size_of(fd, path), path);
    read_exactly(fd, path, 0, data.data(), data.size());
    return data;
}

std::vector<TensorPlace> read_header(int fd, const std::string &path, int64_t file_nbytes, std::string *raw) {
    uint64_t length = 0;
    if (file_nbytes < 8) refuse(path, "it is shorter than the length of its header");
    read_exactly(fd, path, 0, &length, 8);
    if (length > static_cast<uint64_t>(std::min(LARGEST_HEADER, file_nbytes - 8)))
        refuse(path, "its header would be " + std::to_string(length) + " bytes long");
    raw->resize(8 + length);
    read_exactly(fd, path, 0, raw->data(), raw->size());
    std::vector<TensorPlace> places;
    try {
        const auto header = parse_json<Header>(raw->substr(8), path);
        for (const auto &[name, json] : header.items())
            if (name != "__metadata__") places.push_back(place_of(name, json, raw->size(), file_nbytes, path));
    } catch (const Header::exception &error) {
        refuse(path, std::string("its header is malformed (") + error.what() + ")");
    }
    return places;
}

std::vector<NamedTensor> read_tensors(const std::string &path) {
    const Descriptor fd = open_to_read(path);
    std::string raw;
    std::vector<NamedTensor> tensors;
    for (const TensorPlace &place : read_header(fd, path, size_of(fd, path), &raw)) {
        std::string bytes = make_room(place.stop - place.start, path);
        read_exactly(fd, path, place.start, bytes.data(), bytes.size());
        tensors.push_back({place.name, place.dtype, place.shape, std::move(bytes)});
    }
    return tensors;
}

void refuse_existing(const std::string &path) {
    if (access(path.c_str(), F_OK) == 0)
        throw Failure(PS_SOURCE, path + " exists; choose another output, or overwrite it with --force");
}

void write_tensors(const std::string &path, const std::vector<NamedTensor> &tensors, bool force) {
    if (!force) refuse_existing(path);
    // The widest items first, so that each begins at a multiple of its size; then by name, as the library does.
    std::vector<const NamedTensor *> sorted;
    for (const NamedTensor &one : tensors) {
        if (!item_nbytes(one.dtype))
            throw Failure(PS_SOURCE, "outputs of " + one.dtype +
                                         " cannot be written to a safetensors file; leave --output out");
        sorted.push_back(&one);
    }
    std::sort(sorted.begin(), sorted.end(), [](const NamedTensor *one, const NamedTensor *other) {
        return std::make_pair(-item_nbytes(one->dtype), one->name) <
               std::make_pair(-item_nbytes(other->dtype), other->name);
    });
    Header header = Header::object();
    int64_t at = 0;
    for (const NamedTensor *one : sorted) {
        const int64_t stop = at + static_cast<int64_t>(one->bytes.size());
        header[one->name] = {
            {"dtype", find_dtype(one->dtype, false)->stored}, {"shape", one->shape}, {"data_offsets", {at, stop}}};
        at = stop;
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    const uint64_t length = text.size();
    Temporary file(path);
    file.create();
    file.write(std::string(reinterpret_cast<const char *>(&length), 8) + text);
    for (const NamedTensor *one : sorted) file.write(one->bytes);
    file.become(force);
}

}  // namespace penstock
