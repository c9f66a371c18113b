// The last lines of a run: where its files are, and how to report, compare and continue it.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <optional>

#include "cli/train.h"
#include "job/build.h"
#include "titan/checkpoint/step_folder.h"
#include "titan/core/error.h"
#include "train/checkpoints/run_checkpoints.h"

namespace titan::cli {

namespace {

namespace fs = std::filesystem;

// A word that a shell reads back.
std::string shell_word(const std::string& text) {
  const std::string plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,+@%";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos && !text.starts_with('-'))
    return text;
  std::string word = "'";
  for (char c : text) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

std::string shell_word(const fs::path& path) {
  const std::string text = path.lexically_normal().string();
  return shell_word(text.starts_with('-') ? "./" + text : text);
}

// "titan" where the shell's PATH finds this program, else its file.
std::string program() {
  const fs::path self = fs::read_symlink("/proc/self/exe");
  const char* const path = ::getenv("PATH");
  std::string folders = path ? path : "";
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const fs::path found = fs::path(folders.substr(begin, end - begin)) / self.filename();
    std::error_code ignored;
    if (end > begin && fs::exists(found, ignored)) {
      if (fs::equivalent(found, self, ignored)) return self.filename().string();
      break;  // another program of this name comes first
    }
    begin = end + 1;
  }
  const std::string near = self.lexically_proximate(fs::current_path()).string();
  if (near.starts_with("..")) return shell_word(self);
  return near.find('/') == std::string::npos ? "./" + shell_word(near) : shell_word(near);
}

// The run beside this one that was written last.
std::optional<fs::path> other_run(const fs::path& run) {
  constexpr int kMostEntries = 1000;
  std::error_code error;
  const fs::path whole = fs::absolute(run / "").lexically_normal().parent_path();
  std::optional<fs::path> newest;
  fs::file_time_type newest_time;
  int count = 0;
  for (fs::directory_iterator entry(whole.parent_path(), error), end; !error && entry != end;
       entry.increment(error)) {
    if (++count > kMostEntries) break;
    const fs::path folder = entry->path();
    std::error_code none;
    const fs::file_time_type time = fs::last_write_time(folder / "metrics.jsonl", none);
    if (none || folder == whole || !fs::exists(folder / "config.toml", none)) continue;
    if (newest && time < newest_time) continue;
    newest = run.is_absolute() ? folder : folder.lexically_proximate(fs::current_path());
    newest_time = time;
  }
  return newest;
}

// The newest step that a start would resume from.
std::optional<int64_t> newest_state(const train::JobConfig& config) {
  if (!config.checkpoint.enable || config.checkpoint.load_only) return std::nullopt;
  try {
    return train::choose_newest(train::steps_folder(config), std::numeric_limits<int64_t>::max()).step;
  } catch (const Error&) {
    return std::nullopt;
  }
}

// How the next start continues the run.
struct Continuation {
  std::string purpose;
  std::string words;  // to add to the command
};

Continuation continuation(const train::JobConfig& config, int64_t last_step) {
  const train::CheckpointSettings& checkpoint = config.checkpoint;
  if (checkpoint.enable && checkpoint.load_only) return {"repeat it", ""};
  if (checkpoint.enable && checkpoint.create_seed_checkpoint)
    return {"train from its weights", " --checkpoint.no_create_seed_checkpoint"};
  const bool complete = last_step >= config.training.steps;
  const std::string longer = complete ? str(" --training.steps ", 2 * config.training.steps) : "";
  if (const auto step = newest_state(config)) return {str("resume it after step ", *step), longer};
  return {"start it again with saved states, because this run kept none",
          longer + " --checkpoint.enable --checkpoint.no_last_save_model_only"};
}

}  // namespace

std::string next_commands(const train::JobConfig& config, const NextStart& next) {
  const fs::path folder = (train::record_folder(config) / "").lexically_normal().parent_path();
  const std::string titan = program(), run = shell_word(folder);
  const std::string again = str(titan, " train ", shell_word(folder / "config.toml"), next.ranks);
  std::string compare;
  if (const auto other = other_run(folder)) {
    compare = str(titan, " compare ", shell_word(*other), " ", run);
  } else {
    const std::string second = shell_word(fs::path(folder.string() + "_2"));
    compare = str(again, " --job.dump_folder ", second, " --optimizer.lr ", config.optimizer.lr / 2, " && ",
                  titan, " compare ", run, " ", second);
  }
  const Continuation continued = continuation(config, next.last_step);
  return str("the run's files are in ", folder.string(), ". To report it, compare it, and ",
             continued.purpose, ":\n  ", titan, " report ", run, "\n  ", compare, "\n  ", again,
             continued.words);
}

}  // namespace titan::cli
