#include "ladder.h"

#include <algorithm>
#include <cmath>


namespace penstock {

int64_t weight_nbytes(const Json &payload) {
    int64_t nbytes = 0;
    for (const Json &one : payload.at("storages")) nbytes = add_size(nbytes, one.at("nbytes"));
    return nbytes;
}

const Json &find_plan(const Json &payload, int64_t budget, const std::string &program, const std::string &advice) {
    const Json &plans = payload.at("plans");
    const Json *best = nullptr, *lowest = nullptr;
    const auto budget_of = [](const Json *plan) { return plan->at("budget").get<int64_t>(); };
    for (const Json &plan : plans) {
        const Json *const one = &plan;
        if (!lowest || budget_of(one) < budget_of(lowest)) lowest = one;
        if (budget_of(one) <= budget && (!best || budget_of(one) > budget_of(best))) best = one;
    }
    if (!lowest) throw Failure(PS_PLAN, program + " has no plans, and there is no planner here: " + advice);
    if (!best)
        throw Failure(PS_PLAN, "the budget of " + std::to_string(budget) + " bytes is below the lowest plan of " + program +
                                   ", which takes " + std::to_string(budget_of(lowest)) + ": give at least that");
    return *best;
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
