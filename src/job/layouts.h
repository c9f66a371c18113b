#pragma once

// Layouts that a search chooses from, and what each sets.

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "job/job_config.h"

namespace titan::train {

struct Layout {
  int64_t tensor = 1, context = 1, pipeline = 1;
  int64_t replicate = 1;  ///< groups of ranks that share parameters
  std::string schedule;   ///< with a pipeline
  int64_t stages_of_rank = 1;
  int64_t micro_batch = 1;    ///< sequences
  bool only_degrees = false;  ///< the policies below are the base's own
  /// activation_checkpoint.mode, or "op": selective, with that selective_ac_option.
  std::string recompute = "none";
  /// Parameters stay gathered for the backward and from a micro-batch to the next.
  bool keeps_gathered = false;
  bool float8 = false, asynchronous = false;

  // Tried for the best layout only.
  int64_t reshard = 0;         ///< neighbors that share parameters after the forward; 0: all
  bool float8_gather = false;  ///< parameters are gathered in Float8
  std::string context_attention = {}, rotate_method = {};  ///< context_parallel_...; empty: the base's
  bool is_variant() const { return reshard > 0 || float8_gather || !context_attention.empty(); }

  auto operator<=>(const Layout&) const = default;

  struct Setting {
    std::string section, key, value;  ///< as TOML writes it, or "none", as the command line unsets it
  };
  /// For a job of `world` ranks and `sequences` a step.
  std::vector<Setting> settings(int world, int64_t sequences, int64_t layers) const;
  /// "TP 8, PP 4 (Interleaved1F1B, 2 stages), micro-batch 1, recompute full"
  std::string text() const;
};

/// The values of Layout::recompute. "selective" is every n-th layer, as the config has it; "op" is
/// selective_ac_option = "op" (docs/activation_checkpointing.md has measurements).
inline constexpr std::array<const char*, 4> kRecompute = {"none", "selective", "op", "full"};

struct SearchOptions;

/// Within the options, those that the program could run.
std::vector<Layout> all_layouts(const JobConfig& base, const SearchOptions& options);
/// Why there are none: a sentence with the key to change.
std::string why_no_layout(const JobConfig& base, const SearchOptions& options);

}  // namespace titan::train
