// Llama 3 as transformers' LlamaForCausalLM: sizes in config.json, names and rows of the state dict.

#include <cmath>

#include "titan/core/error.h"
#include "titan/models/llama3.h"

namespace titan::models {

namespace {

constexpr const char* kArchitecture = "LlamaForCausalLM";
constexpr int64_t kMostLayers = 10'000;  // each layer adds names to a list
constexpr int64_t kMostRows = int64_t{1} << 28;

std::vector<HfTensor> block_tensors(const Llama3Args& args, int64_t layer) {
  const std::string ours = str("layers.", layer, "."), theirs = str("model.layers.", layer, ".");
  const int64_t dim = args.dim, kv_dim = args.num_kv_heads() * args.head_dim(),
                hidden = args.ffn_hidden_dim();
  const auto tensor = [&](const char* name, const char* hf_name, std::vector<int64_t> shape,
                          int64_t rotary_head_dim = 0) {
    return HfTensor{str(ours, name, ".weight"), str(theirs, hf_name, ".weight"), std::move(shape),
                    rotary_head_dim};
  };
  return {tensor("attention.wq", "self_attn.q_proj", {dim, dim}, args.head_dim()),
          tensor("attention.wk", "self_attn.k_proj", {kv_dim, dim}, args.head_dim()),
          tensor("attention.wv", "self_attn.v_proj", {kv_dim, dim}),
          tensor("attention.wo", "self_attn.o_proj", {dim, dim}),
          tensor("feed_forward.w1", "mlp.gate_proj", {hidden, dim}),
          tensor("feed_forward.w2", "mlp.down_proj", {dim, hidden}),
          tensor("feed_forward.w3", "mlp.up_proj", {hidden, dim}),
          tensor("attention_norm", "input_layernorm", {dim}),
          tensor("ffn_norm", "post_attention_layernorm", {dim})};
}

HfConfig config_of(const Llama3Args& args) {
  HfConfig config = {
      {"architectures.0", kArchitecture},
      {"model_type", "llama"},
      {"hidden_size", args.dim},
      {"intermediate_size", args.ffn_hidden_dim()},
      {"num_hidden_layers", args.n_layers},
      {"num_attention_heads", args.n_heads},
      {"num_key_value_heads", args.num_kv_heads()},
      {"head_dim", args.head_dim()},
      {"vocab_size", args.vocab_size},
      {"max_position_embeddings", args.max_seq_len},
      {"rms_norm_eps", args.norm_eps},
      {"rope_theta", args.rope_theta},
      {"tie_word_embeddings", args.tie_embeddings},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"bos_token_id", {}},  // null because the default of transformers is 1; the tokenizer's files have it
      {"eos_token_id", {}}};
  const RopeScalingArgs& scaling = args.rope_scaling;
  if (!scaling.enabled) {
    config["rope_scaling"] = {};
    return config;
  }
  config["rope_scaling.rope_type"] = "llama3";
  config["rope_scaling.factor"] = scaling.scaling_factor;
  config["rope_scaling.low_freq_factor"] = scaling.low_freq_factor;
  config["rope_scaling.high_freq_factor"] = scaling.high_freq_factor;
  config["rope_scaling.original_max_position_embeddings"] = scaling.original_max_position_embeddings;
  return config;
}

// Reads values from a config.json and collects the problems with them.
class ConfigReader {
 public:
  explicit ConfigReader(const HfConfig& config) : config_(config) {}

  std::vector<std::string> problems;

  /// Whether the key is present and isn't null.
  bool has(const std::string& key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !std::holds_alternative<std::monostate>(found->second);
  }

  bool is(const std::string& key, const std::string& text) const {
    return has(key) && config_.at(key) == HfValue(text);
  }

  bool has_below(const std::string& key) const {
    const auto found = config_.lower_bound(key + ".");
    return found != config_.end() && found->first.starts_with(key + ".");
  }

  /// A required size. Returns 1 if it is missing, so that the rest can be checked.
  int64_t size(const std::string& key, int64_t most = kMostRows) {
    if (!has(key)) report(str(key, " is missing"));
    return size_or(key, 1, most);
  }

  int64_t size_or(const std::string& key, int64_t otherwise, int64_t most = kMostRows) {
    if (!has(key)) return otherwise;
    const int64_t* value = std::get_if<int64_t>(&config_.at(key));
    if (value && *value >= 1 && *value <= most) return *value;
    refuse(key, str("a whole number from 1 to ", most));
    return otherwise;
  }

  double positive_or(const std::string& key, double otherwise) {
    if (!has(key)) return otherwise;
    const HfValue& value = config_.at(key);
    double number = 0;
    if (const auto* whole = std::get_if<int64_t>(&value)) number = static_cast<double>(*whole);
    if (const auto* real = std::get_if<double>(&value)) number = *real;
    if (number > 0 && std::isfinite(number)) return number;
    refuse(key, "a number above 0");
    return otherwise;
  }

  double positive(const std::string& key) {
    if (!has(key)) report(str(key, " is missing"));
    return positive_or(key, 1);
  }

  bool flag_or(const std::string& key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (const bool* value = std::get_if<bool>(&config_.at(key))) return *value;
    refuse(key, "true or false");
    return otherwise;
  }

  /// Reports any value other than `allowed`. `may_be_missing`: the default is `allowed`.
  void expect(const std::string& key, const HfValue& allowed, bool may_be_missing = true) {
    if (!has(key)) {
      if (!may_be_missing) report(str(key, " is missing; only ", to_text(allowed), " is supported"));
    } else if (config_.at(key) != allowed) {
      refuse(key, str("only ", to_text(allowed)));
    }
  }

  void refuse(const std::string& key, const std::string& allowed) {
    report(str(key, " is ", to_text(config_.at(key)), "; allowed: ", allowed));
  }
  void report(std::string problem) { problems.push_back(std::move(problem)); }

 private:
  const HfConfig& config_;
};

// "rope_scaling" in transformers 4; "rope_parameters" in transformers 5, which includes rope_theta.
std::string rope_table(const ConfigReader& reader) {
  return reader.has_below("rope_parameters") ? "rope_parameters" : "rope_scaling";
}

RopeScalingArgs read_rope_scaling(ConfigReader& reader) {
  RopeScalingArgs scaling{.enabled = false};
  const std::string table = rope_table(reader);
  if (!reader.has_below(table)) {
    if (reader.has(table)) reader.refuse(table, "null or an object");
    return scaling;
  }
  const std::string type = table + (reader.has(table + ".rope_type") ? ".rope_type" : ".type");
  if (reader.is(type, "default")) return scaling;
  if (!reader.has(type)) {
    reader.report(str(table, ".rope_type is missing"));
    return scaling;
  }
  if (!reader.is(type, "llama3")) {
    reader.refuse(type, "\"llama3\" or \"default\"");
    return scaling;
  }
  return {.enabled = true,
          .scaling_factor = reader.positive(table + ".factor"),
          .low_freq_factor = reader.positive(table + ".low_freq_factor"),
          .high_freq_factor = reader.positive(table + ".high_freq_factor"),
          .original_max_position_embeddings = reader.size(table + ".original_max_position_embeddings")};
}

// Llama3Args computes the hidden size from dim, so this finds a factor that gives `size` and a multiple that
// keeps it.
void set_ffn_hidden_dim(Llama3Args& args, int64_t size) {
  args.multiple_of = size;
  args.ffn_dim_multiplier =
      (static_cast<double>(size) + 0.5) /
      static_cast<double>(static_cast<int64_t>(8.0 * static_cast<double>(args.dim) / 3.0));
}

void check_supported(ConfigReader& reader) {
  reader.expect("architectures.0", kArchitecture, /*may_be_missing=*/false);
  if (reader.has("architectures.1")) reader.report("architectures has more than one entry");
  reader.expect("model_type", "llama");
  reader.expect("hidden_act", "silu");
  reader.expect("attention_bias", false);
  reader.expect("mlp_bias", false);
  if (reader.has("quantization_config") || reader.has_below("quantization_config"))
    reader.report("quantization_config: quantized weights aren't supported");
}

}  // namespace

HfModel hugging_face_model(const Llama3Args& args) {
  HfModel model{.config = config_of(args), .tensors = {}};
  model.tensors.push_back(
      {"tok_embeddings.weight", "model.embed_tokens.weight", {args.vocab_size, args.dim}});
  for (int64_t layer = 0; layer < args.n_layers; ++layer) {
    for (HfTensor& tensor : block_tensors(args, layer)) model.tensors.push_back(std::move(tensor));
    model.ignored.push_back(str("model.layers.", layer, ".self_attn.rotary_emb.inv_freq"));
  }
  model.tensors.push_back({"norm.weight", "model.norm.weight", {args.dim}});
  if (!args.tie_embeddings)
    model.tensors.push_back({"output.weight", "lm_head.weight", {args.vocab_size, args.dim}});
  return model;
}

Llama3Args args_of_hugging_face(const HfConfig& config) {
  ConfigReader reader(config);
  check_supported(reader);
  Llama3Args args;
  args.dim = reader.size("hidden_size");
  args.n_layers = reader.size("num_hidden_layers", kMostLayers);
  args.n_heads = reader.size("num_attention_heads");
  args.n_kv_heads = reader.size_or("num_key_value_heads", args.n_heads);
  args.vocab_size = reader.size("vocab_size");
  // A missing key has the default of transformers.
  args.norm_eps = reader.positive_or("rms_norm_eps", 1e-6);
  args.rope_theta = reader.positive_or("rope_theta", 10000);
  args.rope_theta = reader.positive_or("rope_parameters.rope_theta", args.rope_theta);
  args.rope_scaling = read_rope_scaling(reader);
  args.max_seq_len = reader.size_or("max_position_embeddings", 2048);
  args.tie_embeddings = reader.flag_or("tie_word_embeddings", false);
  set_ffn_hidden_dim(args, reader.size("intermediate_size"));
  if (reader.problems.empty()) check(args, reader.problems);
  if (reader.problems.empty() && reader.size_or("head_dim", args.head_dim()) != args.head_dim())
    reader.refuse("head_dim", str("hidden_size / num_attention_heads = ", args.head_dim()));
  if (!reader.problems.empty()) throw ConfigError(std::move(reader.problems));
  return args;
}

}  // namespace titan::models
