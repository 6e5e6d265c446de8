// penstock-run: runs a compiled artifact within a byte budget, without Python.

#include <c10/util/Flags.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <iostream>

#include "ladder.h"
#include "pass.h"
#include "program.h"

C10_DECLARE_int(caffe2_log_level);

namespace {

using penstock::Failure;

constexpr const char *HELP =
    R"(Usage: penstock-run ARTIFACT --budget SIZE [OPTIONS]

Run an artifact that was compiled with --lowering inductor --ladder within a byte budget, without Python. It runs the
largest plan of the artifact's ladder that the budget allows, and gives the same bits as penstock run.

  --budget SIZE    Memory for weights: bytes, 32MiB, 8GB, or a share of all weights such as 50%.
  --input FILE     Safetensors file with one tensor for each input.
  --output FILE    Write the outputs of the last pass to this safetensors file.
  --method NAME    Which method to run, where there are several.
  --passes N       How often to run. Default: 1.
  --readers N      Threads that read weights. Default: 3.
  --page-cache     Read through the page cache, for weights that other processes read too.
  --force          Replace an output that exists.
  --json           Print what moved as JSON.
  --trust          Run its machine code: you trust whoever made it.
  -h, --help       Show this and exit.

Exit status: 0 on success; 2 for wrong options, inputs or budgets; 3 for an artifact that is damaged or not for this
machine; 4 for a file that cannot be read or written; 5 if a pass failed; 130 after Ctrl-C. What is wrong is one sentence
on stderr. The artifact's program is machine code, which runs with your rights: it needs --trust.
)";

volatile std::sig_atomic_t interrupted = 0;

// The second Ctrl-C ends the process at once.
void interrupt(int signal) {
    interrupted = 1;
    std::signal(signal, SIG_DFL);
}

struct Arguments {
    std::string artifact, budget, input, output;
    penstock::RunOptions run;
    int passes = 1;
    bool force = false, json = false, help = false, trust = false;
};

[[noreturn]] void refuse(const std::string &sentence) { throw Failure(PS_PLAN, sentence); }

int positive(const std::string &option, const std::string &text) {
    const bool digits = !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || std::stoi(text) < 1) refuse(option + " " + text + " is not a number above 0");
    return std::stoi(text);
}

Arguments parse(int count, char **words) {
    Arguments found;
    std::string number;
    const std::pair<const char *, std::string *> texts[] = {{"--budget", &found.budget},
                                                            {"--input", &found.input},
                                                            {"--output", &found.output},
                                                            {"--method", &found.run.method},
                                                            {"--passes", &number},
                                                            {"--readers", &number}};
    const std::pair<const char *, bool *> flags[] = {{"--force", &found.force},
                                                     {"--json", &found.json},
                                                     {"--trust", &found.trust},
                                                     {"--help", &found.help},
                                                     {"-h", &found.help},
                                                     {"--page-cache", &found.run.buffered}};
    for (int k = 1; k < count; ++k) {
        const std::string word = words[k];
        const auto text = std::find_if(std::begin(texts), std::end(texts), [&](auto &one) { return word == one.first; });
        const auto flag = std::find_if(std::begin(flags), std::end(flags), [&](auto &one) { return word == one.first; });
        if (text != std::end(texts)) {
            if (++k == count) refuse(word + " needs a value: penstock-run --help lists the options");
            *text->second = words[k];
            if (word == "--passes") found.passes = positive(word, number);
            if (word == "--readers") found.run.readers = positive(word, number);
        } else if (flag != std::end(flags)) {
            *flag->second = true;
        } else if (word[0] == '-' || !found.artifact.empty()) {
            refuse("there is no option " + word + ": penstock-run --help lists the options");
        } else {
            found.artifact = word;
        }
    }
    if (!found.help && (found.artifact.empty() || found.budget.empty()))
        refuse("give an artifact and --budget: penstock-run --help lists the options");
    if (!found.help && !found.trust)
        refuse(found.artifact + " holds machine code, which runs with your rights: give --trust if you trust whoever "
                                "made it");
    return found;
}

double seconds_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void report(const Arguments &asked, penstock::Json facts, const std::vector<penstock::NamedTensor> &outputs) {
    facts["outputs"] = penstock::Json::object();
    for (const penstock::NamedTensor &one : outputs)
        facts["outputs"][one.name] = one.dtype + " " + penstock::Json(one.shape).dump();
    if (asked.json) {
        std::cout << facts.dump(2) << std::endl;
        return;
    }
    std::cout << asked.artifact << " within " << penstock::format_size(facts["budget"]) << " (plan for "
              << penstock::format_size(facts["plan_budget"]) << ")\ntime a pass        ";
    for (const auto &seconds : facts["pass_seconds"]) std::cout << seconds.get<double>() << " s  ";
    std::cout << "(load " << facts["load_seconds"].get<double>() << " s)\nmemory for weights "
              << penstock::format_size(facts["peak_bytes"]) << "\nmoved              "
              << penstock::format_size(facts["bytes_moved"]) << "\nwaited for weights "
              << facts["stall_seconds"].get<double>() << " s, " << facts["misses"] << " misses\n";
    for (const auto &[name, shape] : facts["outputs"].items())
        std::cout << "output " << name << ": " << shape.get<std::string>() << "\n";
}

void run(const Arguments &asked) {
    const auto began = std::chrono::steady_clock::now();
    const penstock::Artifact artifact(asked.artifact);
    const int64_t budget = penstock::parse_size(asked.budget, penstock::weight_nbytes(artifact.payload()));
    const penstock::Json &plan =
        penstock::find_plan(artifact.payload(), budget, artifact.folder(), "compile it with --ladder");
    if (!asked.output.empty() && !asked.force) penstock::refuse_existing(asked.output);
    penstock::StreamedProgram program(artifact, plan, asked.run, interrupted);
    program.bind(asked.input.empty() ? std::vector<penstock::NamedTensor>() : penstock::read_tensors(asked.input));
    penstock::Json facts{{"budget", budget}, {"plan_budget", plan.at("budget")}, {"load_seconds", seconds_since(began)}};
    for (int k = 0; k < asked.passes; ++k) facts["pass_seconds"].push_back(program.run());
    const ps_statistics found = program.statistics();
    int64_t outside = 0;
    for (const auto &storage : plan.at("outside"))
        outside = penstock::add_size(outside, artifact.payload().at("storages").at(storage.get<size_t>()).at("nbytes"));
    facts["bytes_moved"] = found.bytes_moved;
    facts["misses"] = found.misses;
    facts["stall_seconds"] = static_cast<double>(found.stall_ns) * 1e-9;
    facts["peak_bytes"] = found.peak_bytes + outside;
    const auto outputs = program.outputs();
    if (!asked.output.empty()) penstock::write_tensors(asked.output, outputs, asked.force);
    report(asked, facts, outputs);
}

int fail(int status, const std::string &sentence) {
    std::cerr << "penstock-run: " << sentence.substr(0, sentence.find('\n')) << std::endl;
    return status;
}

}  // namespace

int main(int count, char **words) {
    std::signal(SIGINT, interrupt);
    std::signal(SIGTERM, interrupt);
    FLAGS_caffe2_log_level = 3;  // what goes wrong in a pass is said here, once
    try {
        const Arguments asked = parse(count, words);
        if (asked.help)
            std::cout << HELP;
        else
            run(asked);
    } catch (const penstock::Interrupted &) {
        return 130;
    } catch (const Failure &failure) {
        const std::pair<ps_status, int> statuses[] = {{PS_PLAN, 2}, {PS_PAYLOAD, 3}, {PS_SOURCE, 4}, {PS_STREAM, 5}};
        for (const auto &[status, code] : statuses)
            if (status == failure.status) return fail(code, failure.what());
        return fail(5, failure.what());
    } catch (const std::bad_alloc &) {
        return fail(5, "there is not enough memory: lower the budget or free some");
    } catch (const std::exception &error) {
        return interrupted ? 130 : fail(5, error.what());
    }
    return 0;
}
