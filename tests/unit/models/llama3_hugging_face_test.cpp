// Names, rows and sizes of Llama 3 in transformers.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "titan/checkpoint/safetensors.h"
#include "titan/core/error.h"
#include "titan/models/llama3.h"

namespace titan::models {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

// tests/data/parity/mini: four heads, two of them for keys and values.
Llama3Args mini() {
  return {.dim = 64,
          .n_layers = 2,
          .n_heads = 4,
          .n_kv_heads = 2,
          .vocab_size = 256,
          .multiple_of = 32,
          .rope_theta = 500000,
          .max_seq_len = 64};
}

SafetensorsFile recorded(const char* name) {
  return SafetensorsFile(std::string(TITAN_SOURCE_DIR "/tests/data/parity/mini/") + name);
}

TEST(Llama3HuggingFace, BothNamesHaveTheSameWeights) {
  const SafetensorsFile ours = recorded("titan.safetensors"), theirs = recorded("hf.safetensors");
  const HfModel model = hugging_face_model(mini());
  EXPECT_EQ(model.tensors.size(), ours.names().size());
  EXPECT_EQ(model.tensors.size(), theirs.names().size());
  for (const HfTensor& tensor : model.tensors) {
    SCOPED_TRACE(tensor.name);
    const at::Tensor a = ours.tensor(tensor.name), b = theirs.tensor(tensor.hf_name);
    EXPECT_EQ(a.sizes(), at::IntArrayRef(tensor.shape));
    EXPECT_TRUE(at::equal(reorder_rows(a, tensor.rotary_head_dim, RowOrder::HuggingFace), b));
    EXPECT_TRUE(at::equal(reorder_rows(b, tensor.rotary_head_dim, RowOrder::Ours), a));
    const at::Tensor rounded = at::empty(a.sizes(), at::kBFloat16);
    reorder_rows(a, tensor.rotary_head_dim, RowOrder::HuggingFace, rounded);
    EXPECT_TRUE(at::equal(rounded, b.to(at::kBFloat16)));
  }
}

TEST(Llama3HuggingFace, ReordersEveryBoxOfRows) {
  const SafetensorsFile ours = recorded("titan.safetensors"), theirs = recorded("hf.safetensors");
  const std::string wk = "layers.1.attention.wk.weight", k_proj = "model.layers.1.self_attn.k_proj.weight";
  const at::Tensor a = ours.tensor(wk), b = theirs.tensor(k_proj);
  for (int64_t begin = 0; begin <= 32; ++begin)
    for (int64_t end = begin; end <= 32; ++end) {
      const Box box{{begin, 3}, {end - begin, 50}};
      const auto part = [&](const at::Tensor& whole) { return whole.slice(0, begin, end).narrow(1, 3, 50); };
      EXPECT_TRUE(at::equal(read_reordered(theirs, k_proj, box, 16, RowOrder::Ours), part(a)));
      EXPECT_TRUE(at::equal(read_reordered(ours, wk, box, 16, RowOrder::HuggingFace), part(b)));
    }
}

TEST(Llama3HuggingFace, ListsATiedMatrixOnce) {
  Llama3Args args = mini();
  args.tie_embeddings = true;
  const HfModel tied = hugging_face_model(args);
  EXPECT_EQ(tied.config.at("tie_word_embeddings"), HfValue(true));
  for (const HfTensor& tensor : tied.tensors) {
    EXPECT_NE(tensor.hf_name, "lm_head.weight");
    EXPECT_NE(tensor.name, "output.weight");
  }
  int64_t elements = 0;
  for (const HfTensor& tensor : tied.tensors) elements += c10::multiply_integers(tensor.shape);
  EXPECT_EQ(elements, num_params(args));
}

TEST(Llama3HuggingFace, SizesSurviveConfigJson) {
  for (const auto& [flavor, args] : llama3_flavors()) {
    SCOPED_TRACE(flavor);
    const HfModel model = hugging_face_model(args);
    const Llama3Args read = args_of_hugging_face(model.config);
    EXPECT_EQ(hugging_face_model(read).config, model.config);
    EXPECT_EQ(read.ffn_hidden_dim(), args.ffn_hidden_dim());
    EXPECT_EQ(num_params(read), num_params(args));
  }
}

// The form that transformers 5 writes.
TEST(Llama3HuggingFace, ReadsRopeParametersOfTransformers5) {
  HfConfig config = hugging_face_model(mini()).config;
  std::erase_if(config, [](const auto& entry) { return entry.first.starts_with("rope_"); });
  config["rope_parameters.rope_theta"] = 1234.0;
  config["rope_parameters.rope_type"] = "default";
  EXPECT_EQ(args_of_hugging_face(config).rope_theta, 1234);
  EXPECT_FALSE(args_of_hugging_face(config).rope_scaling.enabled);
}

TEST(Llama3HuggingFace, ReportsAllProblemsTogether) {
  HfConfig config = hugging_face_model(mini()).config;
  config["architectures.0"] = "MixtralForCausalLM";
  config["hidden_act"] = "gelu";
  config["attention_bias"] = true;
  config["num_hidden_layers"] = int64_t{1} << 40;
  config["rope_scaling.rope_type"] = "yarn";
  config["rms_norm_eps"] = -1.0;
  config["tie_word_embeddings"] = int64_t{1};
  config["quantization_config.bits"] = int64_t{4};
  config.erase("vocab_size");
  try {
    args_of_hugging_face(config);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.problems().size(), 9u) << error.what();
    EXPECT_THAT(error.problems(),
                Contains(HasSubstr("\"MixtralForCausalLM\"; allowed: only \"LlamaForCausalLM\"")));
    EXPECT_THAT(error.problems(), Contains(HasSubstr("vocab_size is missing")));
  }
}

TEST(Llama3HuggingFace, RefusesHeadsOfAnotherSize) {
  HfConfig config = hugging_face_model(mini()).config;
  config["head_dim"] = int64_t{32};
  EXPECT_THROW(args_of_hugging_face(config), ConfigError);
  config["head_dim"] = {};
  EXPECT_EQ(args_of_hugging_face(config).head_dim(), 16);
  config["num_attention_heads"] = int64_t{7};
  EXPECT_THROW(args_of_hugging_face(config), ConfigError);
}

}  // namespace
}  // namespace titan::models
