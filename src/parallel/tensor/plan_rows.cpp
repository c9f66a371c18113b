// The rows of the plan's table: each module's style, layouts, collectives and bytes.

#include <algorithm>
#include <string_view>

#include <torch/nn/module.h>

#include "parallel/fsdp/param_group.h"
#include "parallel/tensor/conversion.h"
#include "parallel/tensor/split_params.h"
#include "titan/core/error.h"
#include "titan/parallel/tensor_parallel.h"

namespace titan {

namespace {

using tp::ConversionHook;
using tp::SplitParams;

// Appends the entry `more` to `text`.
void join(std::string& text, const std::string& more, const char* separator) {
  if (!more.empty()) text += text.empty() ? more : separator + more;
}

void count(PlanRow& row, const tp::Traffic& traffic) {
  row.calls += traffic.calls;
  row.bytes += traffic.bytes;
}

void add_conversion(PlanRow& row, const ConversionHook* hook, const char* where) {
  if (!hook) return;
  const tp::Conversion& conversion = hook->conversion();
  if (row.style != hook->style()) join(row.style, hook->style(), ", ");
  const std::string layouts = str(where, " ", conversion.layouts());
  // A split module's row may list these layouts already.
  if (row.activation.find(layouts) == std::string::npos) join(row.activation, layouts, "; ");
  join(row.collectives, conversion.collectives(), "; ");
  count(row, conversion.traffic());
}

// If several products share one input, only the first exchanges it. Before the first run, all are shown with
// the exchange.
void add_exchange(PlanRow& row, const SplitParams& split, bool ran) {
  const tp::Traffic& traffic = *split.exchanged;
  if (ran && traffic.calls == 0) return;
  row.collectives = str(split.exchanged_collectives, " in products");
  row.transport = traffic.way;
  count(row, traffic);
}

// Adds the gathers that a module makes itself: a loss head's while it computes the loss, or those of Float8's
// scales.
void add_own_gathers(PlanRow& row, const tp::Traffic& traffic) {
  if (traffic.calls == 0) return;
  const bool of_scales = traffic.phase == std::string_view(ops::kScalesPhase);
  join(row.collectives, of_scales ? "all-gather of scales" : "all-gather per chunk / -", "; ");
  count(row, traffic);
}

void add_parameters(PlanRow& row, const SplitParams* split, bool ran) {
  if (!split) return;
  row.style = split->style;
  bool sums_gradients = false;
  for (const tp::PartOfParam& part : split->parts) {
    join(row.weight, str(part.name, " ", part.placement), ", ");
    sums_gradients = sums_gradients || part.gradient_is_summand;
  }
  row.activation = split->layouts;
  if (split->exchanged) add_exchange(row, *split, ran);
  add_own_gathers(row, *split->traffic);
  if (sums_gradients) join(row.collectives, "- / all-reduce of gradients", "; ");
}

// Bytes that this rank receives in the all-reduce of its shards of gradients that are summands.
int64_t gradient_bytes(const nn::HookHost& host, const SplitParams& split) {
  const auto* group = dynamic_cast<const fsdp::ParamGroup*>(host.param_owner.get());
  if (!group) return 0;
  const int64_t ranks = split.axis.size();
  const auto element =
      static_cast<int64_t>(c10::elementSize(group->options().reduce_dtype.value_or(group->param_dtype())));
  int64_t bytes = 0;
  for (size_t slot = 0; slot < group->num_params(); ++slot) {
    const fsdp::ManagedParam& param = group->param(slot);
    const bool is_hosts =
        std::any_of(param.uses.begin(), param.uses.end(), [&](const auto& use) { return use.host == &host; });
    if (is_hosts && param.summand_axis)
      bytes += 2 * group->shard(slot).local.numel() * element / ranks * (ranks - 1);
  }
  return bytes;
}

}  // namespace

std::vector<PlanRow> plan_rows(const nn::AnyRef& root) {
  std::vector<PlanRow> rows;
  const auto hosts = nn::hook_hosts(root.module());
  const bool ran = std::any_of(hosts.begin(), hosts.end(), [](const nn::HookHost* host) {
    const SplitParams* split = tp::split_params(host);
    return split && split->exchanged && split->exchanged->calls > 0;
  });
  for (const auto& named : root.module().named_modules()) {
    const auto* host = dynamic_cast<const nn::HookHost*>(named.value().get());
    if (!host) continue;
    const SplitParams* split = tp::split_params(host);
    const auto* input = dynamic_cast<const ConversionHook*>(host->prepare_input_hook.get());
    const auto* output = dynamic_cast<const ConversionHook*>(host->prepare_output_hook.get());
    if (!split && !input && !output) continue;
    PlanRow row;
    row.module = named.key();
    add_parameters(row, split, ran);
    if (split) row.gradient_bytes = gradient_bytes(*host, *split);
    add_conversion(row, input, "in");
    add_conversion(row, output, "out");
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace titan
