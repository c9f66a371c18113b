#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace titan::cli {

/// `titan train [CONFIG] [--nproc N] [--log-rank RANKS] [--print-config] [--help] [--section.key value ...]`,
/// in any order but for CONFIG, which stands before the first setting.
struct TrainArguments {
  std::filesystem::path config;
  int num_ranks = 0;  ///< 0: --nproc wasn't given
  std::string log_rank = "0";
  bool help = false;
  bool print_config = false;
  std::vector<std::string> overrides;  ///< the settings, for config::load
};

/// Throws ConfigError for an unknown option.
TrainArguments parse_train_arguments(const std::vector<std::string>& words);

}  // namespace titan::cli
