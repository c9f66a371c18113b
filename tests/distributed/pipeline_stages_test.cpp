// Compares a Llama cut into pipeline stages, each spread over all ranks and run one after the other, with the
// same model on one rank. This tests stages with tensor and context parallelism, without schedules and
// transfers.

#include <cmath>

#include <gtest/gtest.h>

#include "distributed/outcome.h"
#include "parallel/pipeline/split.h"
#include "titan/core/error.h"
#include "titan/nn/containers.h"
#include "titan/parallel/context_parallel.h"

namespace titan {
namespace {

using namespace titan::testing;  // NOLINT: the test's own names

struct Variant {
  train::ParallelDims dims;
  TensorParallelOptions tensor = {};
  ContextParallelOptions context = {};
  std::optional<LayersPolicy> checkpointing = std::nullopt;
  int num_stages = 2;
};

std::string name_of(const Variant& variant) {
  const TensorParallelOptions& tensor = variant.tensor;
  return str(variant.num_stages, " stages, dp_shard ", variant.dims.dp_shard, " cp ",
             variant.dims.row_degree(), " tp ", variant.dims.tp,
             tensor.sequence_parallel ? "" : " without sequence parallel",
             tensor.loss_parallel ? "" : " without loss parallel", tensor.overlap ? " overlapped" : "",
             variant.checkpointing ? " checkpointed" : "");
}

using Models = std::vector<std::unique_ptr<train::TrainableModel>>;

Models build_stages(const LlamaCase& llama, const Precision& precision, const Variant& variant,
                    const train::Meshes& meshes) {
  const auto args = make_args(llama);
  const auto names = nn::layer_sequence(build_llama(llama, precision.dtype)->root())->layer_names();
  FsdpOptions fsdp = fsdp_options(precision);
  fsdp.mesh = meshes.fsdp;
  Models models;
  for (const auto& modules :
       pipeline::split_evenly({names.before, names.layers, names.after}, variant.num_stages)) {
    auto model = llama_spec().build(args.get(), {.construct = deferred(device(), precision.dtype),
                                                 .seq_len = llama.seq_len,
                                                 .stage_modules = modules});
    train::apply_parallel_plan(llama_spec(), "", *model,
                               {.meshes = meshes,
                                .fsdp = fsdp,
                                .tensor = variant.tensor,
                                .parallelisms = {context_parallelism(variant.context)},
                                .activations = {variant.checkpointing, {}}});
    materialize(model->root(), kSeed);
    models.push_back(std::move(model));
  }
  return models;
}

// Runs this rank's rows; each stage has its own graph.
double run_in_a_row(const Models& models, const Batch& batch, int64_t num_valid) {
  std::vector<at::Tensor> inputs = {batch.tokens.to(device())}, outputs;
  for (size_t i = 0; i + 1 < models.size(); ++i) {
    outputs.push_back(models[i]->hidden(inputs.back()));
    inputs.push_back(outputs.back().detach().requires_grad_());
  }
  const at::Tensor loss = models.back()->loss(inputs.back(), batch.labels.to(device()), num_valid);
  loss.backward();
  for (size_t i = outputs.size(); i-- > 0;) outputs[i].backward(inputs[i + 1].grad());
  return loss.item<double>();
}

// The gradients of a parameter on two stages add up.
Outcome outcome_of_stages(const Models& models, double loss) {
  Outcome outcome{loss, 0, {}};
  for (const auto& model : models)
    for (const Parameter& parameter : parameters(model->root())) {
      at::Tensor& sum = outcome.gradients[parameter.name];
      const at::Tensor gradient = full_gradient(parameter);
      EXPECT_EQ(sum.defined() && parameter.on_other_stages, sum.defined()) << parameter.name;
      sum = sum.defined() ? sum + gradient : gradient.clone();
    }
  double squares = 0;
  for (const auto& [name, gradient] : outcome.gradients)
    squares += gradient.to(at::kDouble).square().sum().item<double>();
  outcome.norm = std::sqrt(squares);
  return outcome;
}

Outcome run_stages(const LlamaCase& llama, const Batch& batch, const Precision& precision,
                   const Variant& variant) {
  const train::Meshes meshes = train::build_meshes(world(), variant.dims);
  const Models models = build_stages(llama, precision, variant, meshes);
  const double loss =
      run_in_a_row(models, batch.rows(meshes.dp_rank(), meshes.dp_degree()), batch.num_valid());
  return outcome_of_stages(models, meshes.loss.group()->sum(loss, {.phase = "test::loss"}));
}

std::vector<Variant> variants() {
  const int size = world().size();
  std::vector<Variant> all = {{.dims = {.dp_shard = size}}};
  if (size % 2 != 0) return all;
  const train::ParallelDims tp{.dp_shard = size / 2, .tp = 2}, cp{.dp_shard = size / 2, .rows = {{"cp", 2}}};
  for (const TensorParallelOptions& options :
       {TensorParallelOptions{}, TensorParallelOptions{.sequence_parallel = false},
        TensorParallelOptions{.loss_parallel = false}, TensorParallelOptions{.overlap = true}})
    all.push_back({.dims = tp, .tensor = options});
  all.push_back({.dims = tp, .checkpointing = FullRecompute{}});
  all.push_back({.dims = cp, .checkpointing = SelectiveLayers{.n = 2}});
  all.push_back({.dims = cp, .context = {.attention = ContextAttention::AllGatherKv}});
  if (size == 4) all.push_back({.dims = {.rows = {{"cp", 2}}, .tp = 2}, .checkpointing = SelectiveOp{}});
  return all;
}

class PipelineStages : public ::testing::TestWithParam<Precision> {};

// Three layers in two, three and five stages; of five, the first and the last have no layer.
TEST_P(PipelineStages, RunInSequenceEqualTheModel) {
  const Precision precision = GetParam();
  for (const bool tied : {false, true}) {
    LlamaCase llama = tied ? tied_llama() : mini_llama();
    llama.args["n_layers"] = int64_t{3};
    llama.seq_len = 16;
    const Batch batch = random_batch(llama, 11);
    const Outcome expected = run_on_one_rank(llama, batch, precision);
    Worst worst;
    for (Variant variant : variants())
      for (const int num_stages : {2, 3, 5}) {
        variant.num_stages = num_stages;
        expect_equal(run_stages(llama, batch, precision, variant), expected,
                     precision.dtype == at::kDouble ? 1e-10 : 1e-5, name_of(variant), worst);
      }
    worst.print("stages", llama.name, precision);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PipelineStages, ::testing::Values(kFloat64, kFloat32),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace titan
