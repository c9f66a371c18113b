#include "train/pipeline/tied_gradients.h"

#include <algorithm>
#include <map>
#include <sstream>

#include <ATen/core/grad_mode.h>

#include "parallel/interned.h"
#include "titan/core/error.h"

namespace titan::train {

namespace {

// The pipeline ranks that have each tied parameter, in an order that all ranks share.
std::map<std::string, std::vector<int>> holders_of(const std::vector<Parameter>& parameters,
                                                   const DeviceMesh& pp) {
  std::string own;
  for (const Parameter& parameter : parameters)
    if (parameter.on_other_stages) own += parameter.name + "\n";
  std::vector<std::string> texts = {own};
  if (pp.size() > 1) texts = pp.group()->all_gather_text(own, {"train::tied_parameters"});
  std::map<std::string, std::vector<int>> holders;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream lines(texts[rank]);
    for (std::string name; std::getline(lines, name);) {
      auto& ranks = holders[name];
      if (ranks.empty() || ranks.back() != static_cast<int>(rank)) ranks.push_back(static_cast<int>(rank));
    }
  }
  return holders;
}

}  // namespace

// All ranks agree on the copy that counts: the first one of the first rank that has any.
TiedGradients::TiedGradients(std::vector<Parameter>& parameters, const DeviceMesh& pp) {
  for (const auto& [name, holders] : holders_of(parameters, pp)) {
    Tied tied;
    tied.name = interned(name);
    for (Parameter& parameter : parameters) {
      if (parameter.name != name) continue;
      parameter.duplicate = !tied.copies.empty() || holders.front() != pp.rank();
      tied.copies.push_back(parameter.data.local);
    }
    // A frozen one has no gradient to sum, a tensor-parallel part without rows no element of one.
    if (tied.copies.empty() || !tied.copies.front().requires_grad() || tied.copies.front().numel() == 0)
      continue;
    if (holders.size() > 1) {
      std::vector<int> ranks;
      for (const int holder : holders) ranks.push_back(pp.ranks()[static_cast<size_t>(holder)]);
      tied.group = pp.world().group(ranks, "pp.tied." + name, "tied");
    }
    tied_.push_back(std::move(tied));
  }
}

void TiedGradients::sum() const {
  at::NoGradGuard no_grad;
  for (const Tied& tied : tied_) {
    const at::Tensor& first = tied.copies.front().grad();
    TITAN_CHECK(first.defined(), "tied parameter '", tied.name, "' has no gradient to sum");
    for (size_t i = 1; i < tied.copies.size(); ++i) first.add_(tied.copies[i].grad());
    if (tied.group)
      tied.group->all_reduce(first, dist::ReduceOp::Sum, {"pp::tied_gradient", tied.name}).wait();
    for (size_t i = 1; i < tied.copies.size(); ++i) tied.copies[i].grad().copy_(first);
  }
}

}  // namespace titan::train
