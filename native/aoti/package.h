// Code of a method that AOTInductor compiled with probes inside, loaded into this process.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "operators.h"

namespace penstock {

// Raises PS_PAYLOAD and PS_PLAN where code cannot run that was compiled by this version of torch, for this machine
// (docs/payload.md, "Program").
void check_machine(const std::string &torch, const std::string &machine);

at::ScalarType scalar_type(const std::string &name);
std::string name_of(at::ScalarType type);

class ParkedTeam;

class Package {
  public:
    // `bytes` are those of AOTInductor's package. It is code, so load only what you trust. Raises Failure.
    Package(std::string_view bytes, const std::string &method);

    // The names of the weights that the code asks for.
    std::vector<std::string> weights() const;

    // Gives the code its weights where they lie: it takes no copy and no reference.
    void bind(std::unordered_map<std::string, at::Tensor> weights);

    // Runs once, with `probes` between its kernels. Raises what they raised, and else what torch did.
    std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, Probes &probes);

  private:
    std::unordered_map<std::string, at::Tensor> weights_;
    std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;  // destroyed before what it reads
    std::shared_ptr<ParkedTeam> team_;
};

}  // namespace penstock
