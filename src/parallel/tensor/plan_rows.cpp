#include <torch/nn/module.h>

#include "parallel/tensor/split_params.h"
#include "parallel/tensor/tensor_hooks.h"
#include "titan/core/error.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {

namespace {

using tp::ConversionHook;
using tp::SplitParams;

std::string placements_of(const SplitParams* split) {
  std::string text;
  if (!split) return text;
  for (const tp::PartOfParam& part : split->parts())
    text += str(text.empty() ? "" : ", ", part.name, " ", part.placement);
  return text;
}

void add_conversion(PlanRow& row, const nn::CallHook* slot, const char* where) {
  const auto* hook = dynamic_cast<const ConversionHook*>(slot);
  if (!hook) return;
  const tp::Conversion& conversion = hook->conversion();
  const char* separator = row.activation.empty() ? "" : "; ";
  row.activation += str(separator, where, " ", conversion.layouts());
  if (!conversion.collectives().empty())
    row.collectives += str(row.collectives.empty() ? "" : "; ", conversion.collectives());
  row.calls += conversion.traffic().calls;
  row.bytes += conversion.traffic().bytes;
}

std::string style_of(const SplitParams* split, bool input, bool output) {
  if (!split)
    return input && output ? "PrepareInput, PrepareOutput" : input ? "PrepareInput" : "PrepareOutput";
  for (const tp::PartOfParam& part : split->parts())
    if (part.placement.is_shard())
      return part.placement.dim == 0 ? "cut along dim 0" : str("cut along dim ", part.placement.dim);
  return "SequenceParallel";
}

}  // namespace

std::vector<PlanRow> plan_rows(const nn::AnyRef& root) {
  std::vector<PlanRow> rows;
  const auto add = [&](const std::string& name, torch::nn::Module& module) {
    const auto* host = dynamic_cast<const nn::HookHost*>(&module);
    if (!host) return;
    const SplitParams* split = tp::split_params(*host);
    const auto* input = dynamic_cast<const ConversionHook*>(host->prepare_input_hook.get());
    const auto* output = dynamic_cast<const ConversionHook*>(host->prepare_output_hook.get());
    if (!split && !input && !output) return;
    PlanRow row{.module = name, .style = style_of(split, input, output), .weight = placements_of(split)};
    add_conversion(row, input, "in");
    add_conversion(row, output, "out");
    rows.push_back(std::move(row));
  };
  add("", root.module());
  for (const auto& named : root.module().named_modules(/*name_prefix=*/"", /*include_self=*/false))
    add(named.key(), *named.value());
  return rows;
}

}  // namespace titan
