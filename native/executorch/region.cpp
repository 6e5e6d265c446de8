#include "region.h"

#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <cstring>

#include "../failure.h"
#include "../json.h"
#include "../stamp.h"

namespace penstock {

namespace {

void check(Error error, const std::string &what) {
    if (error != Error::Ok)
        throw Failure(PS_STREAM, what + " failed: ExecuTorch says " + executorch::runtime::to_string(error));
}

std::string title(int graph, int region) {
    return "region " + std::to_string(region) + " of graph " + std::to_string(graph);
}

}  // namespace

Json region_facts(const std::string &processed) {
    const size_t end = processed.find('\n');
    const std::string text = end == std::string::npos ? std::string() : processed.substr(end + 1);
    if (processed.substr(0, end) != sha256(text))
        throw Failure(PS_PAYLOAD, "a delegate's bytes are damaged: their sha256 differs; copy the .pte again");
    Json facts = parse_json(text, "a delegate");
    if (facts.value("format", Json()) != "penstock-region" || facts.value("version", Json()) != 2)
        throw Failure(PS_PAYLOAD, "a delegate's bytes are not those of version 2: export the program again");
    return facts;
}

Region::Region(const NamedDataMap &map, const Json &facts, const LoadOptions &options)
    : graph_(facts.at("graph")),
      region_(facts.at("region")),
      step_(facts.at("steps").at(0) == facts.at("steps").at(1) ? -1 : facts.at("steps").at(0).get<int>()),
      inputs_(facts.at("inputs")),
      outputs_(facts.at("outputs")),
      last_(int64_t{region_} + 1 == facts.at("regions")),
      program_(LoadedProgram::of(map, facts.at("payload"), facts.at("budget").is_null() ? -1 : wide_number(facts.at("budget")),
                                 options)),
      memory_(&structures_, program_->scratch(), &temporary_) {
    program_->catalog().check(facts);
    if (facts.at("kernels") == "aotinductor") {
        step_ = -1;  // its code calls the probes of its steps
        std::vector<Placed> weights;
        for (const Json &one : facts.at("appended")) weights.push_back(placed(facts, one));
        compiled_.emplace(map, *program_, facts, weights);
    } else if (facts.at("kernels") == "executorch") {
        load(map, facts);
        append(facts);
    } else {
        throw Failure(PS_PLAN, "this delegate has no kernels of " + facts.at("kernels").get<std::string>() +
                                   ": export the program for \"executorch\" or \"aotinductor\"");
    }
}

void Region::load(const NamedDataMap &map, const Json &facts) {
    const std::string name = facts.at("method");
    Result<executorch::runtime::Method> found = program_->code(map, facts.at("program")).load_method(name.c_str(), &memory_);
    check(found.error(), "loading the kernels of " + title(graph_, region_));
    method_.emplace(std::move(found.get()));
}

// Where a weight or a state lies; nowhere for one that no step reads.
Placed Region::placed(const Json &facts, const Json &one) const {
    const bool brought = program_->catalog().brings(facts, one.at("storage"));
    char *const address = brought ? program_->address(one.at("storage")) : nullptr;
    if (brought && !address) throw Failure(PS_PAYLOAD, title(graph_, region_) + " reads a weight that no plan brings: export it again");
    return {one.at("name"), address ? address + one.at("offset").get<int64_t>() : nullptr, one.at("shape"),
            one.at("dim_order"), scalar_type(one.at("dtype"))};
}

// Gives the method its weights and states where they lie: it takes no copy.
void Region::append(const Json &facts) {
    size_t input = inputs_;
    for (const Json &one : facts.at("appended")) {
        const Placed found = placed(facts, one);
        const auto tensor =
            executorch::extension::make_tensor_ptr(found.shape, found.address, found.dim_order, {}, found.type);
        check(method_->set_input(EValue(*tensor), input++), "giving " + title(graph_, region_) + " its weights");
        states_ += one.at("mutable").get<bool>();
    }
    if (method_->inputs_size() != input || method_->outputs_size() != states_ + outputs_)
        throw Failure(PS_PAYLOAD, title(graph_, region_) + " and its code do not belong together: export it again");
}

void Region::run(Span<EValue *> arguments) {
    if (arguments.size() != inputs_ + outputs_)
        throw Failure(PS_PAYLOAD, title(graph_, region_) + " is called with " + std::to_string(arguments.size()) +
                                      " arguments: export the program again");
    if (compiled_) compiled_->check(arguments);
    std::lock_guard<std::mutex> guard(program_->running());
    try {
        program_->enter(graph_, region_, step_);
        if (compiled_) {
            compiled_->run(*program_, graph_, arguments);
        } else {
            set_arguments(arguments);
            check(method_->execute(), title(graph_, region_));
            give_outputs(arguments);
        }
        program_->leave(graph_, step_, last_);
    } catch (...) {
        program_->abort();
        throw;
    }
}

void Region::set_arguments(Span<EValue *> arguments) {
    for (size_t k = 0; k < inputs_; ++k)
        check(method_->set_input(*arguments[k], k), "giving " + title(graph_, region_) + " its inputs");
    for (size_t k = 0; k < outputs_; ++k) {
        // Its room is for the largest size that the method may give it, whatever the size of the last run.
        const size_t nbytes = method_->get_output(states_ + k).toTensor().nbytes();
        check(method_->set_output_data_ptr(arguments[inputs_ + k]->toTensor().mutable_data_ptr(), nbytes, states_ + k),
              "giving " + title(graph_, region_) + " its outputs");
    }
}

void Region::give_outputs(Span<EValue *> arguments) {
    for (size_t k = 0; k < outputs_; ++k) {
        const Tensor &made = method_->get_output(states_ + k).toTensor();
        Tensor &given = arguments[inputs_ + k]->toTensor();
        check(executorch::runtime::resize_tensor(given, made.sizes()), "an output of " + title(graph_, region_));
        // An output may be a view of an input.
        if (made.const_data_ptr() != given.const_data_ptr())
            std::memcpy(given.mutable_data_ptr(), made.const_data_ptr(), made.nbytes());
    }
}

}  // namespace penstock
