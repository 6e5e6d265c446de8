#include "limits.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <vector>

namespace penstock {

namespace {

constexpr int64_t UNLIMITED = int64_t{1} << 60;  // version 1 shows a number of at least this size for no limit

using Names = std::vector<std::string>;

// Returns the parts of a text between `separator`, empty ones left out.
Names split(const std::string &text, char separator) {
    Names parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);)
        if (!part.empty()) parts.push_back(part);
    return parts;
}

bool contains(const Names &names, const std::string &name) { return std::find(names.begin(), names.end(), name) != names.end(); }

// Returns the number that up to 19 digits stand for, INT64_MAX for a larger one, and nothing for another text.
std::optional<int64_t> number_of(const std::string &text) {
    int64_t value = 0;
    if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
    for (const char digit : text)
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, digit - '0', &value)) return INT64_MAX;
    return value;
}

// Returns the limit that a file holds as its only word; INT64_MAX for no limit, and where there is no such file.
int64_t limit_in(const std::string &path) {
    std::ifstream file(path);
    std::string word, more;
    if (!(file >> word) || file >> more) return INT64_MAX;
    const int64_t limit = number_of(word).value_or(INT64_MAX);
    return limit < UNLIMITED ? limit : INT64_MAX;
}

// Returns the bytes of a control group that are not page cache and cannot be reclaimed, by names of version 1 or 2.
int64_t kept_by(const std::string &group) {
    std::ifstream file(group + "/memory.stat");
    std::map<std::string, int64_t> stat;
    for (std::string line; std::getline(file, line);) {
        const size_t blank = line.find(' ');
        if (blank == std::string::npos) continue;
        if (const auto value = number_of(line.substr(blank + 1))) stat[line.substr(0, blank)] = *value;
    }
    const Names kept = stat.count("total_rss")
                           ? Names{"total_rss", "total_shmem"}
                           : Names{"anon", "shmem", "kernel_stack", "pagetables", "percpu", "slab_unreclaimable", "sock"};
    int64_t sum = 0;
    for (const std::string &name : kept)
        if (__builtin_add_overflow(sum, stat[name], &sum)) return INT64_MAX;
    return sum;
}

// A mounted hierarchy of control groups: its version, and the path of the group that lies at the mount point.
struct Mount {
    int version;
    std::string root;
};

// Returns the text of a field of mountinfo(5), in which blanks and the like are octal numbers behind a backslash.
std::string unescaped(const std::string &field) {
    std::string text;
    for (size_t at = 0; at < field.size(); ++at) {
        const std::string code = field.substr(at + 1, 3);
        const bool octal = code.size() == 3 && code[0] <= '3' && code.find_first_not_of("01234567") == std::string::npos;
        const bool escaped = field[at] == '\\' && octal;
        text += escaped ? static_cast<char>(std::stoi(code, nullptr, 8)) : field[at];
        at += escaped ? 3 : 0;
    }
    return text;
}

// Returns the hierarchies with a memory controller by their mount points, the usual ones where the system does not say.
std::map<std::string, Mount> find_mounts(const std::string &proc, const std::string &groups) {
    std::map<std::string, Mount> mounts;
    std::ifstream table(proc + "/self/mountinfo");
    for (std::string line; std::getline(table, line);) {
        const size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        const Names first = split(line.substr(0, dash), ' '), last = split(line.substr(dash + 3), ' ');
        if (first.size() < 5 || last.size() < 3) continue;
        const bool memory = last[0] == "cgroup" && contains(split(last[2], ','), "memory");
        // A later mount on the same folder covers the earlier one, whatever it is.
        mounts[unescaped(first[4])] = {memory ? 1 : last[0] == "cgroup2" ? 2 : 0, unescaped(first[3])};
    }
    const bool known = std::any_of(mounts.begin(), mounts.end(), [](const auto &one) { return one.second.version > 0; });
    return known ? mounts : std::map<std::string, Mount>{{groups + "/memory", {1, "/"}}, {groups, {2, "/"}}};
}

// Returns the names of the groups from that at a mount point, `root`, down to `path`; nothing if `path` is not below it.
// Both are relative to the namespace, from which `..` leads up. If `root` lies further up than `path` does, the names
// between are unknown, and only the group at the mount point is known to hold this process.
std::optional<Names> below(const std::string &path, const std::string &root) {
    const Names names = split(path, '/'), above = split(root, '/');
    const bool inside = names.size() >= above.size() && std::equal(above.begin(), above.end(), names.begin());
    if (!inside && std::count(above.begin(), above.end(), "..") < static_cast<std::ptrdiff_t>(above.size())) return std::nullopt;
    Names rest(inside ? names.begin() + static_cast<std::ptrdiff_t>(above.size()) : names.end(), names.end());
    return contains(rest, "..") ? std::nullopt : std::optional<Names>(std::move(rest));
}

// Returns the least that the limits of a group and of those above it leave, up to the mount point.
int64_t left_by_groups(const std::string &point, const Mount &mount, Names names) {
    int64_t least = UNKNOWN;
    while (true) {
        std::string group = point;
        for (const std::string &name : names) group += "/" + name;
        // Above memory.high the kernel lets a process allocate no faster than it takes memory back.
        const int64_t limit = mount.version == 1 ? limit_in(group + "/memory.limit_in_bytes")
                                                 : std::min(limit_in(group + "/memory.max"), limit_in(group + "/memory.high"));
        if (limit != INT64_MAX) least = std::min(least, std::max<int64_t>(0, limit - kept_by(group)));
        if (names.empty()) return least;
        names.pop_back();
    }
}

}  // namespace

int64_t available_bytes(const std::string &proc, const std::string &groups) {
    int64_t found = UNKNOWN;
    std::ifstream memory(proc + "/meminfo");
    for (std::string line; std::getline(memory, line);) {
        const Names words = split(line, ' ');
        if (words.size() != 3 || words[0] != "MemAvailable:" || words[2] != "kB") continue;
        if (const auto kilobytes = number_of(words[1])) found = std::min(*kilobytes, (INT64_MAX >> 10) - 1) << 10;
    }
    if (found == UNKNOWN) return UNKNOWN;
    const std::map<std::string, Mount> mounts = find_mounts(proc, groups);
    std::ifstream own(proc + "/self/cgroup");
    for (std::string line; std::getline(own, line);) {  // number:controllers:/path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
        const int version = controllers.empty() ? 2 : contains(split(controllers, ','), "memory") ? 1 : 0;
        for (const auto &[point, mount] : mounts) {
            const auto names = version && mount.version == version ? below(path, mount.root) : std::nullopt;
            if (names) found = std::min(found, left_by_groups(point, mount, *names));
        }
    }
    return found;
}

}  // namespace penstock
