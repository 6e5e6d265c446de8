#include "named_data.h"

#include <executorch/runtime/executor/merged_data_map.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "../failure.h"
#include "../guard.h"
#include "../stamp.h"

namespace penstock {

using executorch::extension::FlatTensorDataMap;
using executorch::extension::MmapDataLoader;
using executorch::runtime::internal::MergedDataMap;

namespace {

constexpr int64_t ALIGNMENT = 4096;  // of entries in their file (docs/payload.md, "In a .pte")

// A part of a file in the address space of this process.
struct Mapping {
    uintptr_t start, stop;
    int64_t offset;
    uint64_t inode;
    std::string path;
};

// The part of a file that is mapped at these bytes, if all of them are.
std::optional<Mapping> find_mapping(const FreeableBuffer &bytes) {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    std::ifstream file("/proc/self/maps");
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        Mapping one{};
        std::string access, device;
        char dash;
        words >> std::hex >> one.start >> dash >> one.stop;
        if (address < one.start || address >= one.stop) continue;
        words >> access >> one.offset >> device >> std::dec >> one.inode >> std::ws;
        const bool named = words && one.inode && std::getline(words, one.path) && one.path[0] == '/';
        return named && bytes.size() <= one.stop - address ? std::optional(one) : std::nullopt;
    }
    return std::nullopt;
}

// The parts of a merged map. ExecuTorch has no function for them; an explicit instantiation may name private members.
struct First {};
struct Second {};
template <typename Which, auto Member>
struct Part {
    friend const NamedDataMap *part_of(const MergedDataMap &map, Which) { return map.*Member; }
};
const NamedDataMap *part_of(const MergedDataMap &map, First);
const NamedDataMap *part_of(const MergedDataMap &map, Second);
template struct Part<First, &MergedDataMap::first_>;
template struct Part<Second, &MergedDataMap::second_>;

std::string name_of(const Json &file) { return file.at("path").get<std::string>(); }

[[noreturn]] void refuse_missing(const NamedDataMap &map, const Json &file, const std::string &path) {
    const uint32_t count = map.get_num_keys().ok() ? map.get_num_keys().get() : 0;
    const std::string key = file.at("key"), prefix = key.substr(0, key.rfind('.'));
    bool any = false;
    for (uint32_t k = 0; k < count; ++k) any |= std::string(map.get_key(k).get()).rfind(prefix, 0) == 0;
    const std::string what = path.empty() ? "what was loaded beside the program" : path;
    if (!any && path.empty())
        throw Failure(PS_SOURCE, "the program's weights lie in " + name_of(file) + ", which was not loaded: give the module "
                                 "that file, or its path as the load option \"weights\"");
    throw Failure(PS_SOURCE, what + " lacks weights of this program (" + key + "): it belongs to another model; load " +
                                 name_of(file) + ", as it was exported with the program");
}

// The bytes of an entry of a data file.
FreeableBuffer take(const NamedDataMap &map, const Json &file) {
    Result<FreeableBuffer> found = map.get_data(file.at("key").get<std::string>());
    const int64_t nbytes = file.at("nbytes");
    if (!found.ok() || static_cast<int64_t>(found->size()) != nbytes)
        throw Failure(PS_SOURCE, name_of(file) + " is damaged: " + file.at("key").get<std::string>() + " is not " +
                                     std::to_string(nbytes) + " bytes there; copy the file again");
    return std::move(found.get());
}

}  // namespace

bool has_key(const NamedDataMap &map, const std::string &key) {
    const Result<uint32_t> count = map.get_num_keys();
    for (uint32_t k = 0; count.ok() && k < count.get(); ++k) {
        const Result<const char *> found = map.get_key(k);
        if (found.ok() && key == found.get()) return true;
    }
    return false;
}

const NamedDataMap *own_map(const NamedDataMap &given, const std::string &key) {
    const auto *const merged = dynamic_cast<const MergedDataMap *>(&given);
    if (!merged) return &given;
    const NamedDataMap *const first = part_of(*merged, First());
    return has_key(*first, key) ? first : part_of(*merged, Second());
}

std::string copy_of(const FreeableBuffer &bytes, const std::string &what) {
    const Guard guard(bytes.data(), static_cast<int64_t>(bytes.size()));
    std::string copy(static_cast<const char *>(bytes.data()), bytes.size());
    if (guard.hit()) throw Failure(PS_SOURCE, what + " was read from a .pte that has been truncated meanwhile: copy the .pte again");
    return copy;
}

FreeableBuffer read_checked(const NamedDataMap &map, const std::string &key) {
    if (!has_key(map, key)) throw Failure(PS_PAYLOAD, "the program lacks its " + key + ": export it again");
    Result<FreeableBuffer> found = map.get_data(key);
    if (!found.ok())
        throw Failure(PS_SOURCE, "the program's " + key + " cannot be read from its .pte (ExecuTorch says " +
                                     executorch::runtime::to_string(found.error()) + "): check the disk, then try again");
    if (key.substr(key.rfind('.') + 1) != sha256(copy_of(*found, "the program's " + key)))
        throw Failure(PS_PAYLOAD, "the program's " + key + " is damaged: its sha256 differs; copy the .pte again");
    return std::move(found.get());
}

NamedWeights::NamedWeights(const NamedDataMap &loaded, const std::string &path, const Json &files) {
    if (!path.empty()) open_data_file(path);
    const NamedDataMap &map = data_file_ ? *data_file_ : loaded;
    for (const Json &file : files) {
        if (file.at("kind") != "named")
            throw Failure(PS_PAYLOAD, "the payload names a weight file instead of named data: export it again");
        if (!has_key(map, file.at("key"))) refuse_missing(map, file, path);
    }
    if (!locate(map, files)) hold(map, files);
}

// Opens the caller's data file by itself, because the runtime's loader need not map it. ExecuTorch is given the descriptor:
// where a signal interrupts its own opening of a file, it gives up.
void NamedWeights::open_data_file(const std::string &path) {
    const Descriptor fd = open_file(path, O_RDONLY);
    if (fd < 0) throw Failure(PS_SOURCE, path + " cannot be opened (" + std::strerror(errno) + "): put the file back");
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) throw Failure(PS_SOURCE, path + " is no file: put the .ptd back");
    const std::string own = "/proc/self/fd/" + std::to_string(fd);
    Result<MmapDataLoader> loader = MmapDataLoader::from(own.c_str(), MmapDataLoader::MlockConfig::NoMlock);
    if (loader.ok()) loader_ = std::make_unique<MmapDataLoader>(std::move(loader.get()));
    Result<FlatTensorDataMap> map =
        loader_ ? FlatTensorDataMap::load(loader_.get()) : Error::AccessFailed;
    if (map.error() == Error::AccessFailed)
        throw Failure(PS_SOURCE, path + " cannot be mapped (ExecuTorch says AccessFailed): check the disk, then try again");
    if (!map.ok()) throw Failure(PS_SOURCE, path + " is no .ptd file, or is damaged: export it again");
    data_file_ = std::make_unique<FlatTensorDataMap>(std::move(map.get()));
}

// Finds the files that are mapped where the entries are; false where one is in no file that can still be opened. One entry
// at a time, because there are loaders that lock or copy what they give.
bool NamedWeights::locate(const NamedDataMap &map, const Json &files) {
    for (const Json &file : files) {
        const FreeableBuffer bytes = take(map, file);
        const std::optional<Mapping> found = find_mapping(bytes);
        const int number = found ? file_number(found->path, found->inode) : -1;
        if (number < 0) {
            entries_.clear(), opened_.clear(), paths_.clear(), sizes_.clear(), descriptors_.clear();
            return false;
        }
        const auto address = reinterpret_cast<uintptr_t>(bytes.data());
        const int64_t offset = found->offset + static_cast<int64_t>(address - found->start);
        if (offset > sizes_[number] - static_cast<int64_t>(bytes.size()))
            throw Failure(PS_SOURCE, found->path + " has been truncated while it was loaded: copy the file again");
        if (offset % ALIGNMENT)
            throw Failure(PS_SOURCE, "weights lie at byte " + std::to_string(offset) + " of " + found->path +
                                         ", which is no multiple of " + std::to_string(ALIGNMENT) +
                                         ": export with ExecutorchBackendConfig(segment_alignment=4096)");
        entries_.push_back({nullptr, static_cast<int64_t>(bytes.size()), offset, number});
    }
    return true;
}

// Keeps entries that are memory of the caller's, and refuses copies, which a loader that reads makes anew each time.
void NamedWeights::hold(const NamedDataMap &map, const Json &files) {
    for (const Json &file : files) {
        buffers_.push_back(take(map, file));
        const FreeableBuffer &bytes = buffers_.back();
        if (!find_mapping(bytes) && take(map, file).data() != bytes.data())
            throw Failure(PS_SOURCE, "all weights would be read into memory, whatever the budget: load the program with "
                                     "LoadMode::Mmap, or give the path of " + name_of(file) + " as the load option \"weights\"");
        entries_.push_back({static_cast<const char *>(bytes.data()), static_cast<int64_t>(bytes.size()), 0, -1});
    }
}

int NamedWeights::file_number(const std::string &path, uint64_t inode) {
    const auto known = std::find(paths_.begin(), paths_.end(), path);
    if (known != paths_.end()) return static_cast<int>(known - paths_.begin());
    Descriptor fd = open_file(path, O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_ino != inode) return -1;
    const auto in_ns = [](const timespec &time) { return time.tv_sec * 1000000000LL + time.tv_nsec; };
    opened_.push_back({fd, in_ns(status.st_mtim), in_ns(status.st_ctim)});
    paths_.push_back(path);
    sizes_.push_back(status.st_size);
    descriptors_.push_back(std::move(fd));
    return static_cast<int>(paths_.size()) - 1;
}

Json NamedWeights::placed(Json payload) const {
    Json files = Json::array();
    const auto add = [&](const std::string &path, int64_t nbytes) {
        files.push_back({{"path", path}, {"nbytes", nbytes}, {"mtime_ns", 0}, {"inode", 0},
                         {"header_sha256", ""}, {"sampled_sha256", ""}});
    };
    const bool in_memory = opened_.empty();
    if (in_memory)
        for (size_t k = 0; k < entries_.size(); ++k) add(payload["files"][k]["path"], entries_[k].nbytes);
    else
        for (size_t k = 0; k < paths_.size(); ++k) add(paths_[k], sizes_[k]);
    for (Json &storage : payload.at("storages"))
        for (Json &extent : storage.at("extents")) {
            const auto number = extent.at("file").get<size_t>();
            if (number >= entries_.size()) throw Failure(PS_PAYLOAD, "an extent names no entry: export the program again");
            const Entry &entry = entries_[number];
            const int64_t offset = extent.at("file_offset"), nbytes = extent.at("nbytes");
            if (offset < 0 || nbytes < 0 || nbytes > entry.nbytes || offset > entry.nbytes - nbytes)
                throw Failure(PS_PAYLOAD, "an extent lies outside its entry: export the program again");
            if (in_memory) continue;
            extent["file"] = entry.file;
            extent["file_offset"] = offset + entry.offset;
        }
    payload["files"] = std::move(files);
    payload.erase("plans");  // the engine is given one
    return payload;
}

int NamedWeights::read(void *context, int32_t file, int64_t offset, void *address, int64_t nbytes) {
    const Entry &entry = static_cast<const NamedWeights *>(context)->entries_[file];
    std::memcpy(address, entry.address + offset, nbytes);
    return 0;
}

}  // namespace penstock
