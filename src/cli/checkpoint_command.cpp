// titan checkpoint convert: between a Hugging Face folder and our one file, without a job.

#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "cli/arguments.h"
#include "cli/commands.h"
#include "titan/checkpoint/hf_model.h"
#include "titan/config/load.h"
#include "titan/core/error.h"
#include "titan/train/hf_form.h"
#include "titan/train/job_config.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// One line on the terminal, written over itself; without a terminal nothing.
class Progress {
 public:
  Progress() : shows_(isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (shows_ && shown_) std::fputs("\n", stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(int64_t bytes, int64_t total) {
    const auto now = Clock::now();
    if (!shows_ || (bytes < total && now - last_ < std::chrono::milliseconds(100))) return;
    last_ = now;
    shown_ = true;
    const double seconds = std::chrono::duration<double>(now - start_).count();
    std::fprintf(stderr, "\r%.2f of %.2f GB (%.0f %%), %.2f GB/s ", bytes / 1e9, total / 1e9,
                 100.0 * static_cast<double>(bytes) / static_cast<double>(total), bytes / 1e9 / seconds);
  }

 private:
  bool shows_, shown_ = false;
  Clock::time_point start_ = Clock::now(), last_;
};

train::JobConfig load_config(const fs::path& path) {
  train::JobConfig config;
  config::load(train::job_schema(), {path, {}}, config);
  return config;
}

HfModel configured_model(const train::JobConfig& config) {
  std::vector<std::string> problems;
  config.spec().check(config.args(), problems);
  if (!problems.empty()) throw ConfigError(std::move(problems));
  auto model = config.spec().hugging_face(config.args());
  if (!model)
    throw ConfigError(
        str("titan checkpoint convert: model.name = ", config.model.name, " has no form in transformers"));
  return *std::move(model);
}

ConvertOptions options_of(const ConvertArguments& arguments, Progress& progress) {
  ConvertOptions options;
  if (!arguments.dtype.empty()) options.dtype = train::scalar_type(arguments.dtype);
  options.folder.shard_bytes = static_cast<int64_t>(arguments.shard_gb * 1e9);
  options.progress = [&progress](int64_t bytes, int64_t total) { progress.show(bytes, total); };
  return options;
}

void from_hugging_face(const ConvertArguments& arguments, const ConvertOptions& options) {
  train::JobConfig config;
  const bool configured = !arguments.config.empty();
  if (configured) config = load_config(arguments.config);
  const HfModel model = train::hf_model_of_folder(config.spec(), arguments.from);
  if (configured) {
    auto problems = config_differences(model, configured_model(config), arguments.from);
    if (!problems.empty()) throw ConfigError(std::move(problems));
  }
  convert_from_hf(arguments.from, arguments.to, model, options);
}

void to_hugging_face(const ConvertArguments& arguments, ConvertOptions options) {
  if (arguments.config.empty())
    throw ConfigError(str("titan checkpoint convert: ", arguments.from.string(),
                          " doesn't say how many heads its model has; add --config, the run's config.toml"));
  const train::JobConfig config = load_config(arguments.config);
  options.folder.assets = config.model.hf_assets_path;
  convert_to_hf(arguments.from, arguments.to, configured_model(config), options);
}

void convert(const ConvertArguments& arguments) {
  if (!fs::exists(arguments.from))
    throw ConfigError(str("titan checkpoint convert: there is nothing at ", arguments.from.string()));
  if (fs::exists(fs::symlink_status(arguments.to)))
    throw ConfigError(str("titan checkpoint convert: ", arguments.to.string(),
                          " is there already; remove it or take another name"));
  Progress progress;
  const ConvertOptions options = options_of(arguments, progress);
  fs::is_directory(arguments.from) ? from_hugging_face(arguments, options)
                                   : to_hugging_face(arguments, options);
}

}  // namespace

int checkpoint_command(const Arguments& words) {
  const ConvertArguments arguments = parse_checkpoint_arguments(words);
  if (!arguments.help.empty()) return std::fputs(arguments.help.c_str(), stdout), 0;
  convert(arguments);
  std::printf("%s\n", arguments.to.c_str());
  return 0;
}

}  // namespace titan::cli
