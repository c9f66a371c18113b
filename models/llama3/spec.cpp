#include "titan/core/error.h"
#include "titan/models/llama3.h"

namespace titan::models {

namespace {

class TrainableLlama3 final : public train::TrainableModel {
 public:
  explicit TrainableLlama3(Llama3 model) : model_(std::move(model)) {}
  nn::AnyRef root() override { return model_; }
  at::Tensor hidden(const at::Tensor& input) override {
    TITAN_CHECK(!model_->output, "llama3: a stage with `output` returns a loss, not hidden states");
    return model_(input);
  }
  at::Tensor loss(const at::Tensor& input, const at::Tensor& labels_BS,
                  int64_t global_valid_tokens) override {
    return model_(input, labels_BS, global_valid_tokens);
  }
  const Llama3& model() const { return model_; }

 private:
  Llama3 model_;
};

train::ModelSizes sizes_of(const Llama3Args& args) {
  return {.num_layers = args.n_layers,
          .num_heads = args.n_heads,
          .num_kv_heads = args.num_kv_heads(),
          .vocab_size = args.vocab_size,
          .num_params = num_params(args)};
}

std::unique_ptr<train::TrainableModel> build(Llama3Args args, const train::BuildOptions& options) {
  if (options.seq_len > 0) args.max_seq_len = options.seq_len;
  return std::make_unique<TrainableLlama3>(Llama3(args, options.construct));
}

}  // namespace

void register_llama3() {
  train::register_model<Llama3Args>(
      "llama3", {.flavours = llama3_flavours(),
                 .sizes = sizes_of,
                 .flops_per_token = flops_per_token,
                 .check = check,
                 .build = build,
                 .parallelize =
                     [](train::TrainableModel& model, const train::ParallelPlan& plan) {
                       parallelize_llama3(dynamic_cast<TrainableLlama3&>(model).model(), plan);
                     },
                 .hugging_face = {.model = hugging_face_model, .args = args_of_hugging_face}});
}

}  // namespace titan::models
