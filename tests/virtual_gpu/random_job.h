#pragma once

// Jobs drawn at random, for plans and virtual GPUs.

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <random>
#include <string>

#include "titan/core/error.h"
#include "unit/job/words.h"

namespace titan::testing {

using train::Words;

/// A job of a few layers that combines what changes a step's memory, launches and messages.
class RandomJob {
 public:
  explicit RandomJob(uint32_t seed, bool may_have_float8 = true)
      : random_(seed), may_have_float8_(may_have_float8) {
    draw_model();
    draw_degrees();
    draw_batches();
    draw_policies();
  }
  int world_size() const { return world_size_; }
  const Words& words() const { return words_; }

 private:
  int64_t draw(std::initializer_list<int64_t> values) { return values.begin()[random_() % values.size()]; }
  std::string draw_text(std::initializer_list<const char*> values) {
    return values.begin()[random_() % values.size()];
  }
  bool draw_percent(uint32_t percent) { return random_() % 100 < percent; }
  template <class Value>
  void set(const std::string& key, const Value& value) {
    words_.push_back(str("--", key, "=", value));
  }
  void turn_on(const std::string& key) { set(key, "true"); }

  void draw_model() {
    struct Size {
      int64_t dim, heads, kv_heads;
    };
    constexpr Size sizes[] = {{4096, 32, 8}, {2048, 16, 16}, {1024, 8, 2}, {3072, 24, 8}, {8192, 64, 8}};
    const Size& size = sizes[random_() % std::size(sizes)];
    set("model.args.dim", size.dim);
    set("model.args.n_heads", size.heads);
    set("model.args.n_kv_heads", size.kv_heads);
    layers_ = draw({2, 3, 4, 6, 9, 16});
    set("model.args.n_layers", layers_);
    set("model.args.vocab_size", draw({128256, 32000, 50257, 4099}));
    if (draw_percent(20)) turn_on("model.args.tie_embeddings");
    set("training.seq_len", draw({1024, 2048, 4096, 8192}));
  }

  void draw_degrees() {
    const int64_t replicas = draw({1, 1, 1, 2, 3}), shards = draw({1, 2, 2, 4, 3, 8}),
                  context = draw({1, 1, 1, 2, 4}), tensor = draw({1, 1, 2, 4, 8});
    pipeline_ = draw({1, 1, 2, 4, 3});
    if (pipeline_ > layers_) pipeline_ = 1;
    dense_ = replicas * shards;
    world_size_ = static_cast<int>(dense_ * context * tensor * pipeline_);
    set("parallelism.data_parallel_replicate_degree", replicas);
    set("parallelism.data_parallel_shard_degree", shards);
    set("parallelism.context_parallel_degree", context);
    set("parallelism.tensor_parallel_degree", tensor);
    set("parallelism.pipeline_parallel_degree", pipeline_);
    if (tensor > 1) {
      if (draw_percent(20)) set("parallelism.enable_sequence_parallel", "false");
      if (draw_percent(20)) turn_on("parallelism.disable_loss_parallel");
      if (draw_percent(30)) turn_on("parallelism.enable_async_tensor_parallel");
    }
    if (context > 1) {
      set("parallelism.context_parallel_load_balancer", draw_text({"headtail", "headtail", "None"}));
      set("parallelism.context_parallel_rotate_method", draw_text({"allgather", "alltoall"}));
      if (draw_percent(30)) set("parallelism.context_parallel_attention", "allgather_kv");
    }
  }

  void draw_batches() {
    const int64_t of_micro_batch = draw({1, 1, 2}),
                  rows = pipeline_ > 1 ? of_micro_batch * pipeline_ * draw({1, 2, 2, 3}) : draw({1, 1, 2, 3});
    set("training.local_batch_size", rows);
    if (draw_percent(30)) set("training.global_batch_size", rows * dense_ * draw({2, 3}));
    if (pipeline_ == 1) return;
    const bool splits = 2 * pipeline_ <= layers_ + 1;
    set("parallelism.pipeline_parallel_schedule",
        splits ? draw_text({"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                            "ZBVZeroBubble", "DualPipeV"})
               : draw_text({"GPipe", "1F1B"}));
    set("parallelism.pipeline_parallel_microbatch_size", of_micro_batch);
    set("parallelism.pipeline_parallel_split", draw_text({"torchtitan", "balanced"}));
  }

  void draw_policies() {
    set("training.dtype", draw_text({"float32", "float32", "bfloat16"}));
    set("parallelism.fsdp_reshard_after_forward", draw_text({"default", "default", "never", "always"}));
    if (draw_percent(40)) set("parallelism.fsdp_reduce_every_micro_batch", "false");
    const bool records = draw_percent(30);
    const std::string recompute =
        draw_text({"none", "full", "selective", "selective", records ? "none" : "offload"});
    set("activation_checkpoint.mode", recompute);
    if (recompute == "selective")
      set("activation_checkpoint.selective_ac_option", draw_text({"op", "1", "2"}));
    const std::string recipe =
        draw_text({"", "", "", "tensorwise", "tensorwise", "rowwise", "rowwise_with_gw_hp"});
    if (!recipe.empty() && may_have_float8_) {
      set("model.converters", "quantize.linear.float8");
      set("quantize.linear.float8.recipe_name", recipe);
      if (recipe == "tensorwise" && draw_percent(40))
        turn_on("quantize.linear.float8.enable_fsdp_float8_all_gather");
      if (recipe == "tensorwise" && draw_percent(30))
        set("quantize.linear.float8.scaling_type_input", "delayed");
    }
    if (records) turn_on("compile.enable");
    if (draw_percent(30))
      set("optimizer.state_dtype", "bfloat16");
    else if (!records)
      set("optimizer.implementation", draw_text({"fused", "foreach", "for-loop"}));
    if (draw_percent(20)) set("optimizer.param_groups", "norm|tok_embeddings: lr=3e-3");
    const std::string loss = draw_text({"cross_entropy", "cross_entropy", "z_loss", "label_smoothing"});
    set("loss.name", loss);
  }

  std::mt19937 random_;  // its numbers are the same everywhere
  bool may_have_float8_;
  Words words_;
  int64_t layers_ = 0, pipeline_ = 1, dense_ = 1;
  int world_size_ = 1;
};

}  // namespace titan::testing
