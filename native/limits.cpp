#include "limits.h"

#include <algorithm>
#include <fstream>
#include <map>

namespace penstock {

namespace {

constexpr int64_t UNLIMITED = int64_t{1} << 60;  // version 1 shows a number of at least this size for no limit

// The number that a file holds; -1 for another text, or where there is no such file.
int64_t number_in(const std::string &path) {
    std::ifstream file(path);
    int64_t value;
    return file >> value ? value : -1;
}

// The bytes of a control group that are not page cache and cannot be reclaimed, by names of version 1 or 2.
int64_t kept_by(const std::string &group) {
    std::ifstream file(group + "/memory.stat");
    std::map<std::string, int64_t> stat;
    std::string name;
    for (int64_t value; file >> name >> value;) stat[name] = value;
    int64_t kept = 0;
    if (stat.count("total_rss"))
        for (const char *one : {"total_rss", "total_shmem"}) kept += stat[one];
    else
        for (const char *one :
             {"anon", "shmem", "kernel_stack", "pagetables", "percpu", "slab_unreclaimable", "sock"})
            kept += stat[one];
    return kept;
}

int64_t least_of_groups(int64_t found, const std::string &root, const std::string &limit, std::string path) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    for (;;) {
        const std::string group = root + path;
        const int64_t most = number_in(group + "/" + limit);
        if (most >= 0 && most < UNLIMITED) found = std::min(found, std::max<int64_t>(0, most - kept_by(group)));
        if (path.empty()) return found;
        path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
}

}  // namespace

int64_t available_bytes(const std::string &proc, const std::string &groups) {
    int64_t found = UNKNOWN;
    std::ifstream memory(proc + "/meminfo");
    for (std::string line; std::getline(memory, line);) {
        const std::string name = "MemAvailable:";
        if (line.compare(0, name.size(), name) == 0) found = std::stoll(line.substr(name.size())) << 10;
    }
    if (found == UNKNOWN) return UNKNOWN;
    std::ifstream own(proc + "/self/cgroup");
    for (std::string line; std::getline(own, line);) {  // number:controllers:/path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
        if (controllers == "memory")
            found = least_of_groups(found, groups + "/memory", "memory.limit_in_bytes", path);
        else if (controllers.empty())
            found = least_of_groups(found, groups, "memory.max", path);
    }
    return found;
}

}  // namespace penstock
