#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace titan::config {

/// Where each value came from; for cross-field checks, whose messages then point at the place. Empty for a
/// job made in code.
class Origins {
 public:
  /// "configs/a.toml:3:1", "command line" or "default".
  std::string origin_of(std::string_view name) const;

  /// "configs/a.toml:3:1: training.seq_len = 100: <what>", "--training.seq_len = 100: <what>", or
  /// "training.seq_len = 2048 (default): <what>"; only "training.seq_len: <what>" for a job made in code.
  std::string problem(std::string_view name, std::string_view what) const;

  struct Origin {
    std::string place;  ///< file:line:column; empty on the command line
    std::string shown;  ///< the value as written
  };
  void set(const std::string& name, Origin origin) { given_.insert_or_assign(name, std::move(origin)); }
  void set_default(const std::string& name, std::string shown) {
    defaults_.insert_or_assign(name, std::move(shown));
  }

 private:
  std::map<std::string, Origin, std::less<>> given_;
  std::map<std::string, std::string, std::less<>> defaults_;
};

}  // namespace titan::config
