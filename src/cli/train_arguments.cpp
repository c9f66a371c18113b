#include "cli/train_arguments.h"

#include <charconv>

#include "titan/config/load.h"
#include "titan/core/error.h"

namespace titan::cli {

namespace {

int parse_count(const std::string& text) {
  int count = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 1)
    throw ConfigError(str("titan train --nproc: '", text, "' isn't a number of ranks"));
  return count;
}

/// "--nproc 2" and "--nproc=2": moves `at` to the option's last word.
bool take(const std::vector<std::string>& words, size_t& at, const std::string& name, std::string& value) {
  if (words[at].starts_with(name + "=")) return value = words[at].substr(name.size() + 1), true;
  if (words[at] != name) return false;
  if (++at == words.size()) throw ConfigError(str("titan train: ", name, " wants a value"));
  return value = words[at], true;
}

bool is_setting(const std::string& word) {
  std::string name = word.substr(0, word.find('='));
  return name.starts_with("--") && name.find('.') != std::string::npos;
}

void take_config(TrainArguments& arguments, const std::string& word) {
  if (!arguments.config.empty())
    throw ConfigError(
        str("titan train takes one config file, got ", arguments.config.string(), " and ", word));
  arguments.config = word;
}

/// job.config_file names the config as the positional argument does.
void find_config_file(TrainArguments& arguments) {
  auto named = config::override_value(arguments.overrides, "job.config_file");
  if (named && *named != "none") take_config(arguments, *named);
}

}  // namespace

TrainArguments parse_train_arguments(const std::vector<std::string>& words) {
  TrainArguments arguments;
  std::string count;
  for (size_t at = 0; at < words.size(); ++at) {
    const std::string& word = words[at];
    if (take(words, at, "--nproc", count) || take(words, at, "-n", count)) continue;
    if (take(words, at, "--log-rank", arguments.log_rank)) continue;
    if (word == "--help" || word == "-h") {
      arguments.help = true;
    } else if (word == "--print-config") {
      arguments.print_config = true;
    } else if (is_setting(word) || (!arguments.overrides.empty() && !word.starts_with("-"))) {
      arguments.overrides.push_back(word);
    } else if (word.starts_with("--")) {
      throw ConfigError(str("titan train: unknown option '", word,
                            "' (settings are --section.key; see titan train --help)"));
    } else if (!arguments.overrides.empty()) {
      arguments.overrides.push_back(word);  // a negative number
    } else {
      take_config(arguments, word);
    }
  }
  if (!count.empty()) arguments.num_ranks = parse_count(count);
  find_config_file(arguments);
  return arguments;
}

}  // namespace titan::cli
