// An artifact folder: its payload, and its lowered program. The engine recognises the weight files.
#pragma once

#include <map>
#include <string>

#include "../json.h"

namespace penstock {

class Artifact {
  public:
    // Reads the payload and the lowered program, and compares both with their hashes. Raises PS_SOURCE for what cannot
    // be read, PS_PAYLOAD for what is malformed, is not what was compiled, or is not read by this program.
    explicit Artifact(const std::string &folder);

    const std::string &folder() const { return folder_; }
    const std::string &text() const { return text_; }
    const Json &payload() const { return payload_; }

    // The method of a name, or the only one for an empty name. Raises PS_PLAN for a method that is not there.
    const Json &method(const std::string &name) const;

    // A file of the lowered program; nothing for one that it does not have.
    std::string_view program_file(const std::string &name) const;

  private:
    void read_program();

    std::string folder_, text_;
    Json payload_;
    std::string program_;                                      // the zip
    std::map<std::string, std::pair<size_t, size_t>> entries_;  // where its files begin in it, and their bytes
};

}  // namespace penstock
