// The entries of a .ptd that hold weights: where their bytes lie, in files that can be read, or in memory of the caller's.
#pragma once

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/flat_tensor/flat_tensor_data_map.h>

#include <memory>
#include <string>
#include <vector>

#include "../files.h"
#include "names.h"

namespace penstock {

bool has_key(const NamedDataMap &map, const std::string &key);

// The map of a loaded program's own data, which is one object as long as the program is loaded: what a delegate is given
// merges it, for each method anew, with the data files.
const NamedDataMap *own_map(const NamedDataMap &given, const std::string &key);

// A copy of bytes of the program, which may lie in a mapping of a file that somebody makes shorter: PS_SOURCE then, which
// calls them `what`.
std::string copy_of(const FreeableBuffer &bytes, const std::string &what);

// The bytes of an entry whose key ends with their sha256. Raises PS_PAYLOAD for one that is missing or damaged.
FreeableBuffer read_checked(const NamedDataMap &map, const std::string &key);

class NamedWeights {
  public:
    // Finds the entries of a payload's weight files in the .ptd at `path`, or in what the runtime has loaded where that is
    // empty. Raises PS_SOURCE where one is missing, has another size, or is not aligned as reads need it.
    NamedWeights(const NamedDataMap &loaded, const std::string &path, const Json &files);

    // The payload as the engine takes it: its files are those that the entries lie in.
    Json placed(Json payload) const;

    // The files of that payload, open for as long as this; none where the entries are memory.
    const std::vector<ps_file> &opened() const { return opened_; }

    // Reads entries that are memory, for ps_options: the context is this object.
    static int read(void *context, int32_t file, int64_t offset, void *address, int64_t nbytes);

  private:
    // Entry number k of the payload's files: bytes of file number `file` from `offset` on, or at `address`.
    struct Entry {
        const char *address;
        int64_t nbytes, offset;
        int file;
    };

    void open_data_file(const std::string &path);
    bool locate(const NamedDataMap &map, const Json &files);
    void hold(const NamedDataMap &map, const Json &files);
    int file_number(const std::string &path, uint64_t inode);

    std::unique_ptr<executorch::extension::MmapDataLoader> loader_;
    std::unique_ptr<executorch::extension::FlatTensorDataMap> data_file_;
    std::vector<FreeableBuffer> buffers_;  // one for each entry that is memory
    std::vector<Entry> entries_;
    std::vector<std::string> paths_;
    std::vector<Descriptor> descriptors_;
    std::vector<ps_file> opened_;
    std::vector<int64_t> sizes_;
};

}  // namespace penstock
