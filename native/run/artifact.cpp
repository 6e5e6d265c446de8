#include "artifact.h"

#include <algorithm>
#include <cmath>

#include "../failure.h"
#include "../stamp.h"
#include "safetensors.h"

namespace penstock {

using Json = nlohmann::json;

namespace {

constexpr int VERSIONS[] = {5, 6};  // of payloads

uint64_t number(const std::string &data, size_t at, int nbytes) {
    uint64_t value = 0;
    for (int k = 0; k < nbytes; ++k) value |= uint64_t{static_cast<unsigned char>(data.at(at + k))} << 8 * k;
    return value;
}

}  // namespace

Artifact::Artifact(const std::string &folder) : folder_(folder) {
    const std::string path = folder + "/payload.json";
    text_ = read_file(path);
    if (read_file(path + ".sha256") != sha256(text_) + "  payload.json\n")
        throw Failure(PS_PAYLOAD, path + " is not what was written: its sha256 differs from that in "
                                         "payload.json.sha256; compile again");
    try {
        payload_ = Json::parse(text_);
        const Json &version = payload_.at("version");
        if (payload_.at("format") != "penstock" || (version != VERSIONS[0] && version != VERSIONS[1]))
            throw Failure(PS_PAYLOAD, path + " has version " + version.dump() + ", and this program reads versions " +
                                          std::to_string(VERSIONS[0]) + " and " + std::to_string(VERSIONS[1]) +
                                          ": compile again");
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
    program_ = read_file(folder_ + "/" + name);
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

std::string Artifact::program_file(const std::string &name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? "" : program_.substr(found->second.first, found->second.second);
}

int64_t Artifact::weight_nbytes() const {
    int64_t nbytes = 0;
    for (const Json &one : payload_.at("storages")) nbytes += one.at("nbytes").get<int64_t>();
    return nbytes;
}

const Json &Artifact::plan(int64_t budget) const {
    const Json &plans = payload_.at("plans");
    const Json *best = nullptr, *lowest = nullptr;
    const auto budget_of = [](const Json *plan) { return plan->at("budget").get<int64_t>(); };
    for (const Json &plan : plans) {
        const Json *const one = &plan;
        if (!lowest || budget_of(one) < budget_of(lowest)) lowest = one;
        if (budget_of(one) <= budget && (!best || budget_of(one) > budget_of(best))) best = one;
    }
    if (!lowest)
        throw Failure(PS_PLAN, folder_ + " has no plans, and there is no planner here: compile it with --ladder");
    if (!best)
        throw Failure(PS_PLAN, "the budget of " + std::to_string(budget) + " bytes is below the lowest plan of " + folder_ +
                                   ", which takes " + std::to_string(budget_of(lowest)) + ": give at least that");
    return *best;
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

int64_t parse_size(const std::string &text, int64_t total) {
    size_t used = 0;
    double value = -1;
    try {
        value = std::stod(text, &used);
    } catch (const std::exception &) {
    }
    std::string unit = text.substr(used);
    std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::tolower(c); });
    double scale = 0;
    if (unit.empty() || unit == "b") scale = 1;
    if (unit == "%") scale = static_cast<double>(total) / 100;
    const size_t power = unit.empty() ? std::string::npos : std::string("kmgt").find(unit[0]);
    if (power != std::string::npos) {
        const std::string rest = unit.substr(1);
        if (rest == "b") scale = std::pow(1000.0, power + 1.0);
        if (rest.empty() || rest == "i" || rest == "ib") scale = std::pow(1024.0, power + 1.0);
    }
    const bool plain = text.find_first_not_of("0123456789") == std::string::npos;
    if (plain && !text.empty() && text.size() < 19 && value > 0) return std::stoll(text);
    const bool fraction = (unit.empty() || unit == "b") && value != std::floor(value);
    if (!text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) && scale > 0 && value > 0 && !fraction &&
        std::isfinite(value) && value * scale < 9e18 && value * scale >= 1)
        return static_cast<int64_t>(value * scale);
    throw Failure(PS_PLAN, "the budget '" + text + "' is not a size: write bytes, '32MiB', '8GB' or '50%'");
}

std::string format_size(int64_t nbytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    auto value = static_cast<double>(nbytes);
    int unit = 0;
    while (value >= 1024 && unit < 4) value /= 1024, ++unit;
    char text[40];
    std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
    return text;
}

}  // namespace penstock
