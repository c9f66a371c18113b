#pragma once

// Named things that a config chooses from and a user's shared object may add to: models, optimizers, data
// sources, tokenizers.
//
//   Registry<SourceFactory> kinds("data set");
//   kinds.add("mine", make_mine);
//   auto source = kinds.get("mine")(request);

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "titan/core/error.h"

// Generated; absent while the library itself is compiled.
#if __has_include("titan/core/build_stamp.h")
#include "titan/core/build_stamp.h"
#endif

namespace titan {

/// Thread-safe. Values are never removed, so references stay valid.
template <class T>
class Registry {
 public:
  /// `kind` is the noun for messages: "model", "data set".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  /// Throws Error when the name is taken.
  void add(const std::string& name, T value) {
    std::lock_guard lock(mutex_);
    TITAN_CHECK(entries_.emplace(name, std::move(value)).second, kind_, " '", name, "' is registered twice");
  }

  bool contains(const std::string& name) const {
    std::lock_guard lock(mutex_);
    return entries_.count(name) != 0;
  }

  /// Throws ConfigError with the known names and the nearest one.
  const T& get(const std::string& name) const {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(name);
    if (found != entries_.end()) return found->second;
    throw ConfigError(unknown(name));
  }

  std::vector<std::string> names() const {
    std::lock_guard lock(mutex_);
    return names_unlocked();
  }

 private:
  std::vector<std::string> names_unlocked() const {
    std::vector<std::string> names;
    for (const auto& [name, value] : entries_) names.push_back(name);
    return names;
  }

  std::string unknown(const std::string& name) const {
    const auto known = names_unlocked();
    return str("unknown ", kind_, " '", name, "'; known: ", known.empty() ? "none" : list_str(known),
               did_you_mean(name, known));
  }

  std::string kind_;
  mutable std::mutex mutex_;
  std::map<std::string, T> entries_;
};

}  // namespace titan
