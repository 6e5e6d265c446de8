#include "artifact.h"

#include <sys/stat.h>

#include "../failure.h"
#include "../json.h"
#include "../stamp.h"
#include "safetensors.h"

namespace penstock {

namespace {

constexpr int PAYLOAD_VERSION = 12;

uint64_t number(const std::string &data, size_t at, int nbytes) {
    uint64_t value = 0;
    for (int k = 0; k < nbytes; ++k) value |= uint64_t{static_cast<unsigned char>(data.at(at + k))} << 8 * k;
    return value;
}

// The ceilings of schedule/bounded_file.py, in bytes.
constexpr int64_t LARGEST_PAYLOAD = 256 << 20, LARGEST_DIGEST = 4096, LARGEST_PROGRAM = 1024 << 20;

// The bytes of a file, unless it is a hole or another file of more bytes than one of its kind has.
std::string read_within(const std::string &path, int64_t most) {
    struct stat status;
    if (stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_size > most)
        throw Failure(PS_PAYLOAD, path + " has " + std::to_string(status.st_size) + " bytes, more than the " +
                                      std::to_string(most) + " that it has at most: get an intact copy");
    return read_file(path);
}

}  // namespace

Artifact::Artifact(const std::string &folder) : folder_(folder) {
    const std::string path = folder + "/payload.json";
    text_ = read_within(path, LARGEST_PAYLOAD);
    if (read_within(path + ".sha256", LARGEST_DIGEST) != sha256(text_) + "  payload.json\n")
        throw Failure(PS_PAYLOAD, path + " is not what was written: its sha256 differs from that in "
                                         "payload.json.sha256; compile again");
    try {
        payload_ = parse_json(text_, path);
        const Json &version = payload_.at("version");
        const bool known = version.is_number_integer() && version == PAYLOAD_VERSION;
        if (payload_.at("format") != "penstock" || !known)
            throw Failure(PS_PAYLOAD, path + " has version " + version.dump() + ", and this program reads version " +
                                          std::to_string(PAYLOAD_VERSION) + ": compile again");
        if (payload_.at("lowering") != "inductor")
            throw Failure(PS_PLAN, folder + " is a program for Python: compile it with --lowering inductor");
        read_program();
    } catch (const Json::exception &error) {
        throw Failure(PS_PAYLOAD, path + " is malformed (" + error.what() + "): compile again");
    }
}

// The zip's directory stands at its end. Its files are stored as they are (docs/payload.md, "Program").
void Artifact::read_program() {
    const Json &program = payload_.at("program");
    const std::string name = program.at("path");
    if (name.empty() || name[0] == '/' || ("/" + name + "/").find("/../") != std::string::npos)
        throw Failure(PS_PAYLOAD, "the payload names the program '" + name + "', which is not inside " + folder_);
    program_ = read_within(folder_ + "/" + name, LARGEST_PROGRAM);
    if (sha256(program_) != program.at("sha256"))
        throw Failure(PS_PAYLOAD, "the lowered program " + folder_ + "/" + name +
                                      " is not the one compiled: its sha256 differs; compile again");
    try {
        const size_t end = program_.rfind("PK\5\6");
        size_t at = end == std::string::npos ? throw std::out_of_range("") : number(program_, end + 16, 4);
        for (uint64_t left = number(program_, end + 10, 2); left; --left) {
            const uint64_t method = number(program_, at + 10, 2), nbytes = number(program_, at + 24, 4);
            const uint64_t name_nbytes = number(program_, at + 28, 2), local = number(program_, at + 42, 4);
            const std::string file = program_.substr(at + 46, name_nbytes);
            const size_t start = local + 30 + number(program_, local + 26, 2) + number(program_, local + 28, 2);
            if (method != 0 || start > program_.size() || nbytes > program_.size() - start) throw std::out_of_range("");
            entries_[file] = {start, nbytes};
            at += 46 + name_nbytes + number(program_, at + 30, 2) + number(program_, at + 32, 2);
        }
    } catch (const std::out_of_range &) {
        throw Failure(PS_PAYLOAD, "the lowered program " + folder_ + "/" + name + " is malformed: compile again");
    }
}

std::string_view Artifact::program_file(const std::string &name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) return {};
    return std::string_view(program_).substr(found->second.first, found->second.second);
}

const Json &Artifact::method(const std::string &name) const {
    std::string names;
    const Json &methods = payload_.at("methods");
    for (const Json &one : methods) {
        if (one.at("name") == name || (name.empty() && methods.size() == 1)) return one;
        names += (names.empty() ? "" : ", ") + one.at("name").get<std::string>();
    }
    throw Failure(PS_PLAN, (name.empty() ? "there are several methods" : "there is no method '" + name + "'") +
                               std::string(": choose one of ") + names + " with --method");
}

}  // namespace penstock
