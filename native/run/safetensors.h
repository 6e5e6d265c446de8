// Safetensors files: named tensors behind a header in JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// A tensor without a library of tensors: torch's name of its dtype, its sizes, and its bytes, row by row.
struct NamedTensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};

// Where a tensor lies in its file.
struct TensorPlace {
    std::string name, dtype;
    std::vector<int64_t> shape;
    int64_t start, stop;  // bytes of the file
};

// Bytes of one item, 0 for a dtype that the format does not have.
int64_t item_nbytes(const std::string &dtype);

// The tensors that the first bytes of a file announce, in the header's order; `raw` becomes those bytes, length prefix
// included. Raises PS_SOURCE for a header that is not one, or whose tensors do not fit into the file.
std::vector<TensorPlace> read_header(int fd, const std::string &path, int64_t file_nbytes, std::string *raw);

// All tensors of a file. Raises PS_SOURCE for a file that is missing or malformed.
std::vector<NamedTensor> read_tensors(const std::string &path);

// Writes a file under another name, flushes and renames it: `path` is the old file or the whole new one. Raises
// PS_SOURCE where `path` exists and `force` is not given, and where the system refuses.
void write_tensors(const std::string &path, const std::vector<NamedTensor> &tensors, bool force);

// Raises PS_SOURCE where a file or anything else has this name.
void refuse_existing(const std::string &path);

// Fills `nbytes` at `offset` of a file; raises PS_SOURCE.
void read_exactly(int fd, const std::string &path, int64_t offset, void *address, int64_t nbytes);
std::string read_file(const std::string &path);

}  // namespace penstock
