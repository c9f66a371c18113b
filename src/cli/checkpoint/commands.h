#pragma once

// `titan checkpoint COMMAND`, none of which starts a job. `arguments` are the words behind the command's
// name.

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "cli/commands.h"

namespace titan::cli {

int checkpoint_convert(const Arguments& arguments);
int checkpoint_ls(const Arguments& arguments);
int checkpoint_info(const Arguments& arguments);
int checkpoint_verify(const Arguments& arguments);
int checkpoint_diff(const Arguments& arguments);
int checkpoint_prune(const Arguments& arguments);

// What a user's path means. `command`: "ls", for the message. Throw ConfigError that says what the path is
// instead, and which one may have been meant.

/// A folder of steps, or the one below a run's folder.
std::filesystem::path steps_folder(const std::filesystem::path& given, std::string_view command);
/// A step's folder, whole or damaged, but of a checkpoint.
std::filesystem::path step_folder(const std::filesystem::path& given, std::string_view command);
/// Whether a folder is a model alone: model.safetensors, or Hugging Face's form.
bool holds_model_only(const std::filesystem::path& folder);

/// Which tensors are meant: all for an empty pattern. Throws ConfigError for what is no regular expression.
std::function<bool(const std::string&)> tensor_filter(const std::string& pattern);

}  // namespace titan::cli
