#pragma once

// The tables [optimizer] and [lr_scheduler]; keys and defaults are TorchTitan's.

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "titan/config/table.h"

namespace titan::optim {

/// [optimizer]. Rules of their own have the rest of their settings in [optimizer.args].
struct OptimizerSettings {
  std::string name = "AdamW";  ///< an entry of optimizers()
  double lr = 8e-4;            ///< peak; the schedule multiplies it by a factor
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< applies to every parameter, norms too, as in TorchTitan
  std::string implementation = "fused";
  /// Exceptions for some parameters, one "regex: key=value, ..." each: "norm: weight_decay=0". Keys are lr and
  /// the rule's numbers. A parameter follows the first entry whose regex is found in its name.
  config::StringList param_groups = {};
  /// [optimizer.args]: the Args that the rule was registered with; null: their defaults.
  std::shared_ptr<const void> args = {};

  /// Keys that every rule reads.
  static constexpr std::array kSharedKeys = {"name", "lr", "param_groups"};
};
void describe(config::Table<OptimizerSettings>& table);

/// [lr_scheduler]. Schedules of their own have the rest of their settings in [lr_scheduler.args].
struct LrSchedulerSettings {
  std::string name = "warmup_stable_decay";  ///< an entry of lr_schedules()
  int64_t warmup_steps = 200;
  std::optional<int64_t> total_steps;  ///< length of the schedule; unset: training.steps
  std::optional<double> decay_ratio;   ///< part of total_steps that decays; unset: all after the warmup
  std::string decay_type = "linear";
  double min_lr_factor = 0;  ///< floor of the decay, as a part of the peak
  /// [lr_scheduler.args]: the Args that the schedule was registered with; null: their defaults.
  std::shared_ptr<const void> args = {};

  /// Keys that every schedule reads.
  static constexpr std::array kSharedKeys = {"name", "total_steps"};
};
void describe(config::Table<LrSchedulerSettings>& table);

/// The settings of a registered entry, their type erased. Args is a struct with a
/// `describe(config::Table<Args>&)` beside it, whose fields are the keys of [optimizer.args] or
/// [lr_scheduler.args]; or it is Settings, and the entry reads [optimizer] or [lr_scheduler] itself.
template <class Settings>
class RegisteredArgs {
 public:
  template <class Args>
  static RegisteredArgs of();

  const std::vector<config::FieldInfo>& fields() const { return fields_; }
  /// The table "args" with its defaults; empty where the entry has none.
  config::DynamicTable table() const;
  /// Keys of Settings that mean nothing to this entry.
  std::vector<std::string> unread_keys() const;
  /// An Args of its own with the values of `settings`.
  std::shared_ptr<void> make(const Settings& settings) const { return make_(settings); }

 private:
  std::vector<config::FieldInfo> fields_;
  std::function<std::shared_ptr<void>(const Settings&)> make_;
  bool has_table_ = true;
};

// ---- templates

template <class Settings>
template <class Args>
RegisteredArgs<Settings> RegisteredArgs<Settings>::of() {
  RegisteredArgs result;
  config::Table<Args> table;
  describe(table);
  result.fields_ = table.fields();
  result.has_table_ = !std::is_same_v<Args, Settings>;
  result.make_ = [](const Settings& settings) {
    if constexpr (std::is_same_v<Args, Settings>) {
      return std::make_shared<Args>(settings);
    } else {
      const auto* args = static_cast<const Args*>(settings.args.get());
      return args ? std::make_shared<Args>(*args) : std::make_shared<Args>();
    }
  };
  return result;
}

template <class Settings>
config::DynamicTable RegisteredArgs<Settings>::table() const {
  return has_table_ ? config::DynamicTable{fields_, make_({})} : config::DynamicTable{};
}

template <class Settings>
std::vector<std::string> RegisteredArgs<Settings>::unread_keys() const {
  std::vector<std::string> keys;
  if (!has_table_) return keys;
  config::Table<Settings> table;
  describe(table);
  const auto& shared = Settings::kSharedKeys;
  for (const config::FieldInfo& field : table.fields())
    if (field.role == config::FieldInfo::Role::Setting &&
        std::find(shared.begin(), shared.end(), field.key) == shared.end())
      keys.push_back(field.key);
  return keys;
}

}  // namespace titan::optim
